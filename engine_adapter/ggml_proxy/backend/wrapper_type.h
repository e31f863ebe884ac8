// The proxy device's buffer type: the inner device's own type, except that compute buffers get a place in the slab.
#pragma once

#include "ggml-backend-impl.h"

namespace expertier {

struct ProxyDevice;

// Fills in `type`, the buffer type of `device`. Weights and caches get buffers of the inner type.
void init_wrapper_type(ggml_backend_buffer_type_t type, ProxyDevice & device);

// Whether this engine allocates weights and compute buffers by different calls; the wrapper cannot work without that.
bool can_wrap();

} // namespace expertier
