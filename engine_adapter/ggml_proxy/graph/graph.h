// Runs a graph of the engine on the inner backend, cut at each layer's first MUL_MAT_ID on expert tensors.
#pragma once

#include "backend/backend.h"

namespace expertier {

ggml_status compute_graph(ProxyBackend & backend, ggml_cgraph * graph);

} // namespace expertier
