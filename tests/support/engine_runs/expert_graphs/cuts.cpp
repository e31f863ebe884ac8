// Graphs that an engine runs in several pieces.
#include "case.h"

namespace expert_graphs {

namespace {

void cut_everywhere(Case & c) {
    c.experts(c.layers[0], c.rows(), c.ids());
    c.output(c.experts(c.layers[1], c.rows(), c.ids()));
    for (int i = 1; i < ggml_graph_n_nodes(c.graph); i++) {
        c.cuts.push_back(i);
    }
}

// Gate, up, GLU and down of the first layer, with a cut behind its first matrix or behind its second.
void cut_between_matrices(Case & c, int n_before) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * gate = c.place(c.mul(c.layers[0].gate, rows, ids));
    if (n_before == 1) {
        c.cut();
    }
    ggml_tensor * up = c.place(c.mul(c.layers[0].up, rows, ids));
    if (n_before == 2) {
        c.cut();
    }
    c.output(c.mul(c.layers[0].down, c.glu(gate, up), ids));
}

void cut_after_gate(Case & c) { cut_between_matrices(c, 1); }

void cut_after_up(Case & c) { cut_between_matrices(c, 2); }

void cut_after_glu(Case & c) {
    ggml_tensor * rows = c.rows();
    ggml_tensor * ids = c.ids();
    ggml_tensor * gate = c.place(c.mul(c.layers[0].gate, rows, ids));
    ggml_tensor * up = c.place(c.mul(c.layers[0].up, rows, ids));
    ggml_tensor * glu = c.place(c.glu(gate, up));
    c.cut();
    c.output(ggml_add(c.context, c.mul(c.layers[0].down, glu, ids), gate));
}

} // namespace

Builds builds_of_cuts() {
    return {
        { "cut everywhere", cut_everywhere },
        { "cut after gate", cut_after_gate },
        { "cut after up", cut_after_up },
        { "cut after GLU", cut_after_glu },
    };
}

} // namespace expert_graphs
