// The proxy device's buffer type: the inner device's own, but for compute buffers, which get their place in the slab.
#pragma once

#include "ggml-backend-impl.h"

namespace expertier {

struct ProxyDevice;

// Fills in `type`, of `device`. Weights and caches pass through, and get buffers of the inner type.
void init_wrapper_type(ggml_backend_buffer_type_t type, ProxyDevice & device);

// Whether this engine tells weights from compute buffers when it allocates them; without that nothing can pass through.
bool can_wrap();

} // namespace expertier
