// A layer call with more distinct experts than slots: run by groups of experts, each group's rows gathered.
#pragma once

#include "backend/backend.h"
#include "graph/expert_call.h"

namespace expertier {

// Runs nodes call.first to call.last. Bit-identical on the CPU backend: a row meets the same kernel as in one call,
// since the kernel is chosen by the rows of an expert, and a group holds all of its experts' rows.
ggml_status run_in_passes(ProxyBackend & backend, ggml_cgraph * graph, const ExpertCall & call);

} // namespace expertier
