// QuietLayers of ggml_proxy/prefetch/quiet_layers.h, for Python.

#include "prefetch/quiet_layers.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using expertier::QuietLayers;

EXPORT QuietLayers * quiet_new(int n_layers) { return new QuietLayers(n_layers); }
EXPORT void quiet_delete(QuietLayers * self) { delete self; }
EXPORT void quiet_note(QuietLayers * self, int layer, int64_t n) { self->note(layer, n); }
EXPORT void quiet_settle(QuietLayers * self, int n_layers, int64_t expert_bytes) {
    self->settle(std::vector<int64_t>(n_layers, expert_bytes));
}
EXPORT int quiet_has(QuietLayers * self, int layer) { return self->has(layer); }
