// Graphs around a layer's experts, as an engine may build them, by name. Each is run on a device and its outputs are
// copied out, so that tests/engine_adapter/ggml_proxy/test_expert_graphs.py can compare the proxy with the CPU device.

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "ggml-impl.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <stdexcept>
#include <vector>

namespace {

constexpr int n_layers = 2;
constexpr int n_matrices = 3; // gate, up, down

enum error : int32_t {
    no_such_graph = 100,
    not_made = 101,
    not_restored = 102,
    thrown = 103
}; // beside ggml's statuses

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

// ---- the graphs

void plain(Case & c) { c.output(c.experts(c.layers[0], c.rows(), ggml_cont(c.context, c.ids()))); }

void strided_ids(Case & c) { c.output(c.experts(c.layers[0], c.rows(), c.ids_from(2, c.n_used))); }

void two_layers(Case & c) {
    ggml_tensor * first = c.place(c.experts(c.layers[0], c.rows(), c.ids()));
    c.output(c.experts(c.layers[1], first, c.ids()));
}

// As in the last layer of a batch whose logits nobody asked for.
void no_tokens_left(Case & c) {
    c.output(c.experts(c.layers[0], c.rows(), c.ids()));
    ggml_tensor * table = ggml_reshape_2d(c.context, c.rows(), c.x->ne[0], c.n_tokens);
    ggml_tensor * none = ggml_get_rows(c.context, table, ggml_view_1d(c.context, c.choice, 0, 0));
    ggml_tensor * ids = ggml_view_2d(c.context, c.choice, c.n_used, 0, c.choice->nb[1], 0);
    c.output(c.experts(c.layers[1], ggml_reshape_3d(c.context, none, c.x->ne[0], 1, 0), ids));
}

void cut_everywhere(Case & c) {
    c.experts(c.layers[0], c.rows(), c.ids());
    c.output(c.experts(c.layers[1], c.rows(), c.ids()));
    for (int i = 1; i < ggml_graph_n_nodes(c.graph); i++) {
        c.cuts.push_back(i);
    }
}

void cut_after_gate(Case & c) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * gate = c.place(c.mul(c.layers[0].gate, rows, ids));
    c.cut();
    ggml_tensor * up = c.place(c.mul(c.layers[0].up, rows, ids));
    c.output(c.mul(c.layers[0].down, c.glu(gate, up), ids));
}

void cut_after_up(Case & c) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * gate = c.place(c.mul(c.layers[0].gate, rows, ids));
    ggml_tensor * up = c.place(c.mul(c.layers[0].up, rows, ids));
    c.cut();
    c.output(c.mul(c.layers[0].down, c.glu(gate, up), ids));
}

void cut_after_glu(Case & c) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * gate = c.place(c.mul(c.layers[0].gate, rows, ids));
    ggml_tensor * up = c.place(c.mul(c.layers[0].up, rows, ids));
    ggml_tensor * glu = c.place(c.glu(gate, up));
    c.cut();
    c.output(ggml_add(c.context, c.mul(c.layers[0].down, glu, ids), gate));
}

void input_between(Case & c) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * gate = c.place(c.mul(c.layers[0].gate, rows, ids));
    ggml_tensor * up = c.mul(c.layers[0].up, ggml_relu(c.context, ggml_scale(c.context, rows, 2.0f)), ids);
    c.output(c.mul(c.layers[0].down, c.glu(gate, up), ids));
}

void input_between_as_a_view(Case & c) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * gate = c.place(c.mul(c.layers[0].gate, rows, ids));
    ggml_tensor * late = c.place(ggml_relu(c.context, rows));
    ggml_tensor * up = c.mul(c.layers[0].up, ggml_reshape_3d(c.context, late, rows->ne[0], 1, c.n_tokens), ids);
    c.output(c.mul(c.layers[0].down, c.glu(gate, up), ids));
}

// The rows that `up` reads by their own name have changed since `gate` read them.
void input_changed_in_place(Case & c) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * gate = c.place(c.mul(c.layers[0].gate, rows, ids));
    c.place(ggml_scale_inplace(c.context, rows, -3.0f));
    ggml_tensor * up = c.place(c.mul(c.layers[0].up, rows, ids));
    c.output(c.mul(c.layers[0].down, c.glu(gate, up), ids));
}

void in_place(Case & c) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * gate = ggml_silu_inplace(c.context, c.place(c.mul(c.layers[0].gate, rows, ids)));
    ggml_tensor * up = c.place(c.mul(c.layers[0].up, rows, ids));
    c.output(c.mul(c.layers[0].down, ggml_mul_inplace(c.context, gate, up), ids));
}

void halves(Case & c) {
    ggml_tensor * both = c.place(c.mul(c.layers[0].gate, c.rows(), c.ids()));
    const int64_t n = both->ne[0] / 2;
    ggml_tensor * half[2];
    for (int i = 0; i < 2; i++) {
        half[i] =
            ggml_view_3d(c.context, both, n, both->ne[1], both->ne[2], both->nb[1], both->nb[2], i * n * both->nb[0]);
    }
    c.output(c.glu(half[0], half[1]));
}

void interleaved_layers(Case & c) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * gate[n_layers];
    ggml_tensor * up[n_layers];
    for (int i = 0; i < n_layers; i++) {
        gate[i] = c.place(c.mul(c.layers[i].gate, rows, ids));
    }
    for (int i = 0; i < n_layers; i++) {
        up[i] = c.place(c.mul(c.layers[i].up, rows, ids));
    }
    ggml_tensor * first = c.place(c.mul(c.layers[0].down, c.glu(gate[0], up[0]), ids));
    c.output(ggml_add(c.context, first, c.mul(c.layers[1].down, c.glu(gate[1], up[1]), ids)));
}

// Of two branches only one is computed; the other's ids never are.
void unselected_branch(Case & c) {
    ggml_tensor * ids = c.ids();
    ggml_tensor * never = ggml_repeat(c.context, ggml_cont(c.context, ids), ids);
    ggml_tensor * branches[] = { c.mul(c.layers[0].gate, c.rows(), never), c.mul(c.layers[0].up, c.rows(1.5f), ids) };
    c.output(ggml_build_forward_select(c.graph, branches, 2, 1));
}

// A node that is not computed lies between those that are.
void uncomputed_between(Case & c) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * gate = c.place(c.mul(c.layers[0].gate, rows, ids));
    ggml_tensor * idle = c.place(c.mul(c.layers[0].down, gate, ids));
    idle->flags &= ~GGML_TENSOR_FLAG_COMPUTE;
    ggml_tensor * up = c.place(c.mul(c.layers[0].up, rows, ids));
    c.output(c.mul(c.layers[0].down, c.glu(gate, up), ids));
}

void interior_output(Case & c) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * gate = c.mul(c.layers[0].gate, rows, ids);
    c.output(gate);
    ggml_tensor * up = c.place(c.mul(c.layers[0].up, rows, ids));
    c.output(c.mul(c.layers[0].down, c.glu(gate, up), ids));
}

// The next layer takes one row less of each token: there are gaps between the tokens.
void strided_rows(Case & c) {
    ggml_tensor * all = c.place(c.experts(c.layers[0], c.rows(), c.ids()));
    ggml_tensor * some = ggml_view_3d(c.context, all, all->ne[0], c.n_used - 1, c.n_tokens, all->nb[1], all->nb[2], 0);
    c.output(c.experts(c.layers[1], some, c.ids_from(0, c.n_used - 1)));
}

void view_of_wider_rows(Case & c) {
    ggml_tensor * wide = ggml_concat(c.context, c.rows(), c.rows(2.0f), 0);
    ggml_tensor * rows =
        ggml_view_3d(c.context, wide, c.x->ne[0], 1, c.n_tokens, wide->nb[1], wide->nb[2], c.x->ne[0] * wide->nb[0]);
    c.output(c.experts(c.layers[0], rows, c.ids()));
}

void unrelated_between(Case & c) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * gate = c.place(c.mul(c.layers[0].gate, rows, ids));
    ggml_tensor * other = c.place(ggml_sqr(c.context, ggml_scale(c.context, c.x, 0.25f)));
    ggml_tensor * up = c.place(c.mul(c.layers[0].up, rows, ids));
    ggml_tensor * again = c.place(ggml_relu(c.context, other));
    c.output(ggml_add(c.context, c.mul(c.layers[0].down, c.glu(gate, up), ids), again));
}

void biases(Case & c) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * gate = ggml_add_id(c.context, c.place(c.mul(c.layers[0].gate, rows, ids)), c.bias, ids);
    ggml_tensor * up = ggml_add_id(c.context, c.place(c.mul(c.layers[0].up, rows, ids)), c.bias, ids);
    c.output(ggml_add_id(c.context, c.mul(c.layers[0].down, c.glu(gate, up), ids), c.bias, ids));
}

// Biases whose memory may be another's once they have been added.
void input_biases(Case & c) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * gate = c.place(c.mul(c.layers[0].gate, rows, ids));
    ggml_tensor * up = ggml_add_id(c.context, c.place(c.mul(c.layers[0].up, rows, ids)), c.given, ids);
    c.output(c.mul(c.layers[0].down, c.glu(gate, up), ids));
}

void computed_biases(Case & c) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * early = c.place(ggml_scale(c.context, c.given, 2.0f));
    ggml_tensor * gate = ggml_add_id(c.context, c.place(c.mul(c.layers[0].gate, rows, ids)), early, ids);
    ggml_tensor * late = c.place(ggml_scale(c.context, c.given, -1.0f));
    ggml_tensor * up = c.place(ggml_add_id(c.context, c.mul(c.layers[0].up, rows, ids), late, ids));
    ggml_tensor * after = c.place(ggml_scale(c.context, c.given, 5.0f));
    c.output(c.mul(c.layers[0].down, c.glu(gate, up), ids));
    c.output(ggml_scale(c.context, after, 0.5f));
}

void biases_of_other_ids(Case & c) {
    ggml_tensor * ids = c.ids();
    ggml_tensor * gate = c.place(c.mul(c.layers[0].gate, c.rows(), ids));
    gate = ggml_add_id(c.context, gate, c.bias, c.ids_from(3, c.n_used));
    c.output(c.mul(c.layers[0].down, gate, ids));
}

// Factors and terms from outside, one of them made between the layer's nodes, one a number a row.
void factors(Case & c) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * terms = c.place(ggml_repeat_4d(c.context, c.rows(2.0f), rows->ne[0], c.n_used, c.n_tokens, 1));
    ggml_tensor * gate = ggml_add(c.context, c.place(c.mul(c.layers[0].gate, rows, ids)), terms);
    ggml_tensor * each = c.place(ggml_sum_rows(c.context, terms));
    ggml_tensor * up = ggml_mul(c.context, c.place(c.mul(c.layers[0].up, rows, ids)), each);
    c.output(c.mul(c.layers[0].down, c.glu(gate, up), ids));
}

void no_gate(Case & c) {
    ggml_tensor * ids = c.ids();
    ggml_tensor * up = ggml_sqr(c.context, ggml_relu(c.context, c.mul(c.layers[0].up, c.rows(), ids)));
    c.output(c.mul(c.layers[0].down, up, ids));
}

// Layers of the usual form with whatever else comes to mind in between, drawn from a seed.
class RandomGraph {
  public:
    explicit RandomGraph(Case & c) : c_(c), random_(c.seed) {}

    void build() {
        given_ = { c_.place(c_.rows()), c_.place(c_.rows(2.0f)) };
        ggml_tensor * sum = nullptr;
        for (int i = 0; i < 3; i++) {
            ggml_tensor * out = layer(c_.layers[below(n_layers)], below(4) ? c_.ids() : c_.ids_from(3, c_.n_used));
            sum = sum ? c_.place(ggml_add(c_.context, sum, out)) : out;
        }
        c_.output(sum);
    }

  private:
    size_t below(size_t n) { return random_() % n; }
    bool one_in(size_t n) { return below(n) == 0; }
    ggml_tensor * any_given() { return given_[below(given_.size())]; }

    ggml_tensor * layer(const Layer & layer, ggml_tensor * ids) {
        ggml_tensor * rows = any_given();
        ggml_tensor * gate = dressed(c_.place(c_.mul(layer.gate, rows, ids)), ids);
        interlude();
        ggml_tensor * up = dressed(c_.place(c_.mul(layer.up, one_in(4) ? any_given() : rows, ids)), ids);
        interlude();
        ggml_tensor * hidden = c_.place(one_in(4) ? ggml_mul(c_.context, gate, up) : c_.glu(gate, up));
        hidden = dressed(hidden, ids);
        interlude();
        ggml_tensor * out = c_.place(c_.mul(layer.down, hidden, ids));
        return one_in(8) ? c_.place(ggml_add(c_.context, out, one_in(2) ? gate : hidden)) : out;
    }

    // Rows of experts after what a layer may do to them.
    ggml_tensor * dressed(ggml_tensor * rows, ggml_tensor * ids) {
        if (one_in(20)) {
            c_.output(rows);
        }
        switch (below(20)) {
        case 0:
            return c_.place(ggml_silu(c_.context, rows));
        case 1:
            return c_.place(ggml_add_id(c_.context, rows, c_.bias, ids));
        case 2:
            return c_.place(ggml_add_id(c_.context, rows, c_.given, ids));
        case 3:
            return c_.place(ggml_mul(c_.context, rows, each_expert(any_given())));
        case 4:
            return c_.place(ggml_add(c_.context, each_expert(any_given()), rows));
        case 5:
            return ggml_reshape_3d(c_.context, rows, rows->ne[0], rows->ne[1], rows->ne[2]);
        case 6:
            return one_in(2) ? c_.place(ggml_scale_inplace(c_.context, rows, 0.5f)) : rows;
        default:
            return rows;
        }
    }

    ggml_tensor * each_expert(ggml_tensor * rows) {
        return c_.place(ggml_repeat_4d(c_.context, rows, rows->ne[0], c_.n_used, c_.n_tokens, 1));
    }

    // What has nothing to do with the layer, or has after all.
    void interlude() {
        switch (below(14)) {
        case 0:
            c_.cut();
            break;
        case 1:
            given_.push_back(c_.place(ggml_relu(c_.context, any_given())));
            break;
        case 2:
            given_.push_back(c_.place(ggml_scale_inplace(c_.context, any_given(), -1.5f)));
            break;
        case 3:
            c_.place(ggml_scale_inplace(c_.context, any_given(), 1.5f));
            break;
        default:
            break;
        }
    }

    Case & c_;
    std::mt19937 random_;
    std::vector<ggml_tensor *> given_; // [n, 1, n_tokens]
};

void random_graph(Case & c) { RandomGraph(c).build(); }

void view_of_experts(Case & c) {
    ggml_tensor * gate = c.layers[0].gate;
    ggml_tensor * view =
        ggml_view_3d(c.context, gate, gate->ne[0], gate->ne[1], gate->ne[2], gate->nb[1], gate->nb[2], 0);
    c.output(c.mul(view, c.rows(), c.ids()));
}

void get_rows_of_experts(Case & c) {
    ggml_tensor * one_of_each = ggml_view_2d(c.context, c.choice, 1, c.choice->ne[0], c.choice->nb[0], 0);
    c.output(ggml_get_rows(c.context, c.layers[0].gate, one_of_each));
}

void mul_mat_of_experts(Case & c) {
    const ggml_tensor * gate = c.layers[0].gate;
    ggml_tensor * one = ggml_view_1d(c.context, c.rows(), gate->ne[0], 0);
    c.output(ggml_mul_mat(c.context, c.layers[0].gate, ggml_repeat_4d(c.context, one, gate->ne[0], 1, gate->ne[2], 1)));
}

using Build = void (*)(Case &);
const std::map<std::string, Build> graphs = {
    { "plain", plain },
    { "strided ids", strided_ids },
    { "two layers", two_layers },
    { "no tokens left", no_tokens_left },
    { "cut everywhere", cut_everywhere },
    { "cut after gate", cut_after_gate },
    { "cut after up", cut_after_up },
    { "cut after GLU", cut_after_glu },
    { "input between", input_between },
    { "input between, as a view", input_between_as_a_view },
    { "input changed in place", input_changed_in_place },
    { "in place", in_place },
    { "halves", halves },
    { "interleaved layers", interleaved_layers },
    { "unselected branch", unselected_branch },
    { "uncomputed between", uncomputed_between },
    { "interior output", interior_output },
    { "strided rows", strided_rows },
    { "view of wider rows", view_of_wider_rows },
    { "unrelated between", unrelated_between },
    { "biases", biases },
    { "input biases", input_biases },
    { "computed biases", computed_biases },
    { "biases of other ids", biases_of_other_ids },
    { "factors", factors },
    { "no gate", no_gate },
    { "random", random_graph },
    { "view of experts", view_of_experts },
    { "GET_ROWS of experts", get_rows_of_experts },
    { "MUL_MAT of experts", mul_mat_of_experts },
};

// ---- running them

using Sources = std::vector<const ggml_tensor *>;

Sources sources_of(ggml_cgraph * graph) {
    Sources all;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        all.insert(all.end(), node->src, node->src + GGML_MAX_SRC);
    }
    return all;
}

ggml_backend_ptr start(ggml_backend_dev_t device) {
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    auto set_n_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads"));
    if (backend && set_n_threads) {
        set_n_threads(backend.get(), 1);
    }
    return backend;
}

// Has the scheduler stop after the last node before each cut.
bool observe(ggml_tensor * node, bool ask, void * user) {
    const Case & c = *static_cast<Case *>(user);
    return !ask || std::any_of(c.cuts.begin(), c.cuts.end(),
                               [&](int cut) { return ggml_graph_node(c.graph, cut - 1) == node; });
}

ggml_status run_cut(ggml_backend_t backend, Case & c) {
    int begin = 0;
    c.cuts.push_back(ggml_graph_n_nodes(c.graph));
    for (int end : c.cuts) {
        ggml_cgraph segment = ggml_graph_view(c.graph, begin, end);
        if (ggml_status status = ggml_backend_graph_compute(backend, &segment)) {
            return status;
        }
        begin = end;
    }
    return GGML_STATUS_SUCCESS;
}

} // namespace

// What to run, and on what. Mirrored in tests/support/engine_runs/expert_graphs.py.
struct graph_request {
    const char * name;
    void * device;                     // null: the CPU device, with the matrices' bytes
    void * experts_type;               // buffer type of the expert matrices, with `device`
    int32_t scheduled;                 // 1: through the engine's scheduler, with the CPU device as the other one
    const char * const * matrix_names; // gate, up and down of each layer
    const int32_t * matrix_types;      // ggml types of gate, up and down
    const void * const * matrix_data;  // of gate, up and down of each layer
    int64_t n;                         // elements of a row
    int64_t n_experts;
    int64_t n_used;
    int64_t n_tokens;
    uint32_t seed;          // of the random graph
    const float * x;        // [n_tokens][n]
    const int32_t * choice; // [n_tokens][n_experts]
    const float * bias;     // [n_experts][n], for `bias` and `given`
};

// The name of the graph with this number; null behind the last.
extern "C" __attribute__((visibility("default"))) const char * expert_graph_name(int32_t number) {
    return number < (int32_t) graphs.size() ? std::next(graphs.begin(), number)->first.c_str() : nullptr;
}

// Writes the outputs one after another to `out`, which has room for `max` values. 0, a ggml status or an `error`.
extern "C" __attribute__((visibility("default"))) int32_t run_expert_graph(const graph_request * request, float * out,
                                                                           int64_t max, int64_t * n_out) {
    const auto build = graphs.find(request->name);
    if (build == graphs.end()) {
        return no_such_graph;
    }
    ggml_backend_dev_t cpu_device = ggml_backend_dev_by_name("CPU");
    ggml_backend_dev_t device = static_cast<ggml_backend_dev_t>(request->device);
    ggml_backend_buffer_type_t experts_type = static_cast<ggml_backend_buffer_type_t>(request->experts_type);
    if (device == nullptr) {
        device = cpu_device;
        experts_type = ggml_backend_dev_buffer_type(cpu_device);
    }
    ggml_backend_ptr backend = start(device);
    ggml_context_ptr weights(ggml_init({ 16 * ggml_tensor_overhead(), nullptr, true }));
    ggml_context_ptr others(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
    ggml_context_ptr nodes(ggml_init({ 256 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
    std::vector<ggml_tensor *> matrices;
    for (int i = 0; i < n_layers * n_matrices; i++) {
        matrices.push_back(ggml_new_tensor_3d(weights.get(), (ggml_type) request->matrix_types[i % n_matrices],
                                              request->n, request->n, request->n_experts));
        ggml_set_name(matrices.back(), request->matrix_names[i]);
    }
    ggml_backend_buffer_ptr matrix_buffer(ggml_backend_alloc_ctx_tensors_from_buft(weights.get(), experts_type));
    ggml_tensor * bias = ggml_new_tensor_2d(others.get(), GGML_TYPE_F32, request->n, request->n_experts);
    ggml_backend_buffer_ptr bias_buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(others.get(), ggml_backend_dev_buffer_type(device)));
    if (!backend || !matrix_buffer || !bias_buffer) {
        return not_made;
    }
    ggml_backend_buffer_set_usage(matrix_buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_buffer_set_usage(bias_buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_tensor_set(bias, request->bias, 0, ggml_nbytes(bias));
    for (size_t i = 0; device == cpu_device && i < matrices.size(); i++) {
        ggml_backend_tensor_set(matrices[i], request->matrix_data[i], 0, ggml_nbytes(matrices[i]));
    }

    Case c = {};
    c.context = nodes.get();
    c.graph = ggml_new_graph(nodes.get());
    c.layers = { { matrices[0], matrices[1], matrices[2] }, { matrices[3], matrices[4], matrices[5] } };
    c.x = ggml_new_tensor_3d(c.context, GGML_TYPE_F32, request->n, 1, request->n_tokens);
    c.choice = ggml_new_tensor_2d(c.context, GGML_TYPE_I32, request->n_experts, request->n_tokens);
    c.bias = bias;
    c.given = ggml_new_tensor_2d(c.context, GGML_TYPE_F32, request->n, request->n_experts);
    c.n_used = request->n_used;
    c.n_tokens = request->n_tokens;
    c.seed = request->seed;
    for (ggml_tensor * input : { c.x, c.choice, c.given }) {
        ggml_set_input(input);
    }
    build->second(c);

    ggml_backend_ptr cpu = request->scheduled ? start(cpu_device) : nullptr;
    ggml_backend_sched_ptr scheduler;
    ggml_gallocr_ptr allocator;
    if (cpu) {
        ggml_backend_t backends[] = { backend.get(), cpu.get() };
        scheduler.reset(ggml_backend_sched_new(backends, nullptr, 2, 256, false, true));
        if (!ggml_backend_sched_alloc_graph(scheduler.get(), c.graph)) {
            return not_made;
        }
        if (!c.cuts.empty()) {
            ggml_backend_sched_set_eval_callback(scheduler.get(), observe, &c);
        }
    } else {
        allocator.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend.get())));
        if (!ggml_gallocr_alloc_graph(allocator.get(), c.graph)) {
            return not_made;
        }
    }
    const std::pair<ggml_tensor *, const void *> inputs[] = { { c.x, request->x },
                                                              { c.choice, request->choice },
                                                              { c.given, request->bias } };
    for (const auto & [input, data] : inputs) {
        if (input->buffer && !ggml_is_empty(input)) { // one that this graph does not use has no memory
            ggml_backend_tensor_set(input, data, 0, ggml_nbytes(input));
        }
    }

    const Sources before = sources_of(c.graph);
    ggml_status status;
    try {
        status = scheduler ? ggml_backend_sched_graph_compute(scheduler.get(), c.graph) : run_cut(backend.get(), c);
    } catch (const std::runtime_error &) { // bytes that ggml could not be given
        return thrown;
    }
    if (sources_of(c.graph) != before) {
        return not_restored;
    }
    if (status != GGML_STATUS_SUCCESS) {
        return status;
    }
    *n_out = 0;
    for (const ggml_tensor * output : c.outputs) {
        const int64_t n = ggml_nelements(output);
        if (*n_out + n > max) {
            return not_made;
        }
        ggml_backend_tensor_get(output, out + *n_out, 0, n * sizeof(float));
        *n_out += n;
    }
    return status;
}
