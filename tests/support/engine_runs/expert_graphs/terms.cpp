// Biases and factors on the experts' rows: of the model, given as inputs, or computed in the graph.
#include "case.h"

namespace expert_graphs {

namespace {

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

} // namespace

Builds builds_of_terms() {
    return {
        { "biases", biases },
        { "input biases", input_biases },
        { "computed biases", computed_biases },
        { "biases of other ids", biases_of_other_ids },
        { "factors", factors },
    };
}

} // namespace expert_graphs
