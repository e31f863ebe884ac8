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
    int first = 0; // index in the graph of the call's first node
    int last = 0;  // and of its last node
    int64_t n_used = 0;
    int64_t n_tokens = 0;
    std::vector<int32_t> expert_of_row; // the router's ids: n_used for each of n_tokens tokens
    std::vector<int32_t> experts;       // the distinct ids, ascending
};

// The expert tensor that `node` multiplies by; null when it multiplies by none.
const ExpertTensor * find_expert_operand(const ggml_tensor * node);

// Whether `node` belongs to `call`.
bool belongs(const ExpertCall & call, const ggml_tensor * node);

// The call that begins at node `first`. Its ids have yet to be read (read_ids).
ExpertCall find_call(ggml_cgraph * graph, int first, const ExpertTensor & expert);

// Waits for `backend` and reads the call's ids, through `room`. False, with the thread's error set, when an id is out
// of range.
bool read_ids(ggml_backend_t backend, PinnedInts & room, ExpertCall & call);

} // namespace expertier
