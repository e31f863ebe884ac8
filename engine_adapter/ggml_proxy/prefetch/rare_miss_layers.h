// Which layers lack an expert so rarely that predicting it costs more than it saves: a prediction takes the device some
// microseconds in every graph, beside the kernels of a layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace expertier {

class RareMissLayers {
  public:
    explicit RareMissLayers(size_t n_layers) : layers_(n_layers) {}
    // A graph used `n` experts of the layer that were in no slot, before anything was fetched ahead.
    void note(int layer, int64_t n);
    // Chooses which layers are not predicted, until it is called again: graphs are captured with what is predicted in
    // them. `expert_bytes` are each layer's.
    void update(const std::vector<int64_t> & expert_bytes);
    bool has(int layer) const { return layers_[layer].misses_rarely; }
    int n() const;

  private:
    struct Layer {
        int64_t n_missing = 0, n_graphs = 0; // of the last ones
        bool misses_rarely = false;
    };
    std::vector<Layer> layers_;
};

} // namespace expertier
