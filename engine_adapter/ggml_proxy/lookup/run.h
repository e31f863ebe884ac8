// Runs a decode graph whose experts are looked up on the device: everything is queued ahead, and the host only serves layers that miss.
#pragma once

#include "backend/backend.h"

#include <optional>

namespace expertier {

// Nothing when the graph is not to be run so, or could not be ended so: then it is to be run without.
std::optional<ggml_status> try_device_lookup(ProxyBackend & backend, ggml_cgraph * graph);

} // namespace expertier
