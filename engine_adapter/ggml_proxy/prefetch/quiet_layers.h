// Which layers lack an expert so rarely that predicting it costs more than it saves: a prediction takes the device some
// microseconds in every graph, beside the kernels of a layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace expertier {

class QuietLayers {
  public:
    explicit QuietLayers(size_t n_layers) : layers_(n_layers) {}
    // A graph used `n` experts of the layer that were in no slot, before anything was fetched ahead.
    void note(int layer, int64_t n);
    // Settles which layers are quiet, until it is called again: graphs are captured with what is predicted in them.
    // `expert_bytes` are each layer's.
    void settle(const std::vector<int64_t> & expert_bytes);
    bool has(int layer) const { return layers_[layer].is_quiet; }
    int n() const;

  private:
    struct Layer {
        int64_t n_missing = 0, n_graphs = 0; // of the last ones
        bool is_quiet = false;
    };
    std::vector<Layer> layers_;
};

} // namespace expertier
