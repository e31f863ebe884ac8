// Runs a decode graph through the gate: everything is queued ahead, and the host only serves layers that miss.
#pragma once

#include "backend/backend.h"

#include <optional>

namespace expertier {

// Nothing when the graph is not to be run so, or could not be ended so: then it is to be run without.
std::optional<ggml_status> try_gated(ProxyBackend & backend, ggml_cgraph * graph);

} // namespace expertier
