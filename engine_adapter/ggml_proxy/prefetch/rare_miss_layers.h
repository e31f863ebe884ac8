// Which layers miss so rarely that predicting their experts costs more than it saves: a prediction takes the device some
// microseconds in every graph, besides the kernels of the layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace expertier {

class RareMissLayers {
  public:
    explicit RareMissLayers(size_t n_layers) : layers_(n_layers) {}
    // A graph used `n` experts of the layer that would have been in no slot without prefetches.
    void note(int layer, int64_t n);
    // Chooses the layers that are not predicted until the next call; not at any time, because a captured graph holds its
    // predictions. `expert_bytes` is the size of an expert of each layer.
    void update(const std::vector<int64_t> & expert_bytes);
    bool has(int layer) const { return layers_[layer].misses_rarely; }
    int n() const;

  private:
    struct Layer {
        int64_t n_missing = 0, n_graphs = 0; // of the last graphs
        bool misses_rarely = false;
    };
    std::vector<Layer> layers_;
};

} // namespace expertier
