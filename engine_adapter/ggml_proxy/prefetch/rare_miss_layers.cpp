#include "prefetch/rare_miss_layers.h"

#include <algorithm>

namespace expertier {

namespace {

constexpr int64_t enough_graphs = 48, memory = 512;

// The mean of the bytes that a layer lacks in a graph. A PCIe 5 link copies so many in 6 us; a prediction takes 2.5 us
// on a fast GPU, and is right and in time two times out of five (docs/measurements/gpu-engine.md).
constexpr int64_t rare_miss_bytes = 300 << 10;

} // namespace

void RareMissLayers::note(int layer, int64_t n) {
    Layer & mine = layers_[layer];
    if (mine.n_graphs == memory) {
        mine.n_graphs /= 2;
        mine.n_missing /= 2;
    }
    mine.n_graphs += 1;
    mine.n_missing += n;
}

void RareMissLayers::update(const std::vector<int64_t> & expert_bytes) {
    for (size_t i = 0; i < layers_.size(); i++) {
        Layer & layer = layers_[i];
        layer.misses_rarely =
            layer.n_graphs >= enough_graphs && layer.n_missing * expert_bytes[i] < layer.n_graphs * rare_miss_bytes;
    }
}

int RareMissLayers::n() const {
    return (int) std::count_if(layers_.begin(), layers_.end(), [](const Layer & layer) { return layer.misses_rarely; });
}

} // namespace expertier
