// What a graph around a layer's experts is built from.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace expert_graphs {

constexpr int n_layers = 2;
constexpr int n_matrices = 3; // gate, up, down

struct Layer {
    ggml_tensor * gate;
    ggml_tensor * up;
    ggml_tensor * down;
};

// What a graph is built from and what is to be done with it. Rows have `n` elements, in and between the matrices.
struct Case {
    ggml_context * context;
    ggml_cgraph * graph;
    std::vector<Layer> layers;
    ggml_tensor * x;      // [n, 1, n_tokens]
    ggml_tensor * choice; // [n_experts, n_tokens]: all experts in each token's own order
    ggml_tensor * bias;   // [n, n_experts], of the model: in a buffer of weights
    ggml_tensor * given;  // [n, n_experts], an input of the graph
    int64_t n_used;
    int64_t n_tokens;
    uint32_t seed;
    std::vector<ggml_tensor *> outputs;
    std::vector<int> cuts; // nodes before each of these run as a graph of their own

    // Gives a node its place in the graph's order: here.
    ggml_tensor * place(ggml_tensor * node) {
        ggml_build_forward_expand(graph, node);
        return node;
    }
    void cut() { cuts.push_back(ggml_graph_n_nodes(graph)); }
    void output(ggml_tensor * node) {
        ggml_set_output(node);
        outputs.push_back(place(node));
    }

    ggml_tensor * rows(float factor = 0.5f) { return ggml_scale(context, x, factor); } // memory that may be reused
    ggml_tensor * ids_from(int64_t first, int64_t n) {
        return ggml_view_2d(context, choice, n, n_tokens, choice->nb[1], first * choice->nb[0]);
    }
    ggml_tensor * ids() { return ids_from(0, n_used); }
    ggml_tensor * mul(ggml_tensor * matrix, ggml_tensor * rows, ggml_tensor * ids) {
        return ggml_mul_mat_id(context, matrix, rows, ids);
    }
    ggml_tensor * glu(ggml_tensor * gate, ggml_tensor * up) { return ggml_swiglu_split(context, gate, up); }
    // gate, up, GLU, down, in this order.
    ggml_tensor * experts(const Layer & layer, ggml_tensor * rows, ggml_tensor * ids) {
        ggml_tensor * gate = place(mul(layer.gate, rows, ids));
        ggml_tensor * up = place(mul(layer.up, rows, ids));
        return mul(layer.down, glu(gate, up), ids);
    }
};

using Build = void (*)(Case &);
using Builds = std::map<std::string, Build>; // by the names that the tests use

Builds builds_of_nodes();    // experts, and nodes between them
Builds builds_of_cuts();     // graphs that run in several pieces
Builds builds_of_terms();    // biases and factors on the experts' rows
Builds builds_of_refusals(); // what the proxy does not compute with experts
void build_random(Case & c); // layers drawn from the case's seed

} // namespace expert_graphs
