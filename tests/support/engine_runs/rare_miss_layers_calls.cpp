// RareMissLayers of ggml_proxy/prefetch/rare_miss_layers.h, for Python.

#include "prefetch/rare_miss_layers.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using expertier::RareMissLayers;

EXPORT RareMissLayers * rare_miss_layers_new(int n_layers) { return new RareMissLayers(n_layers); }
EXPORT void rare_miss_layers_delete(RareMissLayers * self) { delete self; }
EXPORT void rare_miss_layers_note(RareMissLayers * self, int layer, int64_t n) { self->note(layer, n); }
EXPORT void rare_miss_layers_update(RareMissLayers * self, int n_layers, int64_t expert_bytes) {
    self->update(std::vector<int64_t>(n_layers, expert_bytes));
}
EXPORT int rare_miss_layers_has(RareMissLayers * self, int layer) { return self->has(layer); }
