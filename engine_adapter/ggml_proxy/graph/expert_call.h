// One layer's use of its experts within a graph: the nodes that share one ids tensor.
#pragma once

#include "backend/expert_buffer.h"
#include "ggml-backend.h"
#include "backend/pinned_ids.h"

#include <memory>
#include <vector>

namespace expertier {

struct ExpertCall {
    std::shared_ptr<Tiers> tiers;
    int layer = -1;
    const ggml_tensor * ids = nullptr;
    int first = 0; // index of its first and of its last node in the graph
    int last = 0;
    int64_t n_used = 0;
    int64_t n_tokens = 0;
    std::vector<int32_t> expert_of_row; // n_tokens rows of n_used, as the router chose them
    std::vector<int32_t> experts;       // distinct, ascending
};

// The expert tensor that `node` multiplies by; null when it does not.
const ExpertTensor * find_expert_operand(const ggml_tensor * node);

// Whether `node` belongs to `call`.
bool belongs(const ExpertCall & call, const ggml_tensor * node);

// The call that starts at node `first`, without its ids.
ExpertCall find_call(ggml_cgraph * graph, int first, const ExpertTensor & expert);

// Waits for `backend` and reads the call's ids, through `room`. False (and the tiers' error set) when one is out of
// range.
bool read_ids(ggml_backend_t backend, PinnedInts & room, ExpertCall & call);

} // namespace expertier
