// Runs a decode graph whose experts are looked up on the device: the host queues the whole graph, and then serves only
// the layers that miss.
#pragma once

#include "backend/backend.h"

#include <optional>

namespace expertier {

// Nothing when the graph does not fit, or when the run fell back: the caller then runs the graph without device
// look-ups.
std::optional<ggml_status> try_device_lookup(ProxyBackend & backend, ggml_cgraph * graph);

} // namespace expertier
