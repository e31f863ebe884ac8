// Experts of one layer and of two, with other nodes of the engine between them.
#include "case.h"

namespace expert_graphs {

namespace {

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

void no_gate(Case & c) {
    ggml_tensor * ids = c.ids();
    ggml_tensor * up = ggml_sqr(c.context, ggml_relu(c.context, c.mul(c.layers[0].up, c.rows(), ids)));
    c.output(c.mul(c.layers[0].down, up, ids));
}

} // namespace

Builds builds_of_nodes() {
    return {
        { "plain", plain },
        { "strided ids", strided_ids },
        { "two layers", two_layers },
        { "no tokens left", no_tokens_left },
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
        { "no gate", no_gate },
    };
}

} // namespace expert_graphs
