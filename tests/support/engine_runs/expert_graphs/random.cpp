// A graph of layers of the usual form, drawn from a seed, with other nodes between them.
#include "case.h"

#include <random>

namespace expert_graphs {

namespace {

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

} // namespace

void build_random(Case & c) { RandomGraph(c).build(); }

} // namespace expert_graphs
