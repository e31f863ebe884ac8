// Uses of expert matrices that the proxy refuses.
#include "case.h"

namespace expert_graphs {

namespace {

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

} // namespace

Builds builds_of_refusals() {
    return {
        { "view of experts", view_of_experts },
        { "GET_ROWS of experts", get_rows_of_experts },
        { "MUL_MAT of experts", mul_mat_of_experts },
    };
}

} // namespace expert_graphs
