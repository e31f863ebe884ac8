#include "graph/paths/looked_up.h"
#include "residency/errors.h"

#include <new>

namespace expertier {

ggml_status LookedUpPath::begin(ExpertCall & call) {
    pinned_ = call.tiers->acquire(backend_.inner, call.layer, call.experts);
    return pinned_ ? upload_slot_ids(call) : GGML_STATUS_FAILED;
}

ggml_status LookedUpPath::upload_slot_ids(const ExpertCall & call) {
    std::vector<int32_t> slot_of(call.tiers->slots().n_experts(call.layer), 0);
    for (size_t i = 0; i < call.experts.size(); i++) {
        slot_of[call.experts[i]] = pinned_.slots()[i];
    }
    std::vector<int32_t> slots(call.expert_of_row.size());
    for (size_t i = 0; i < slots.size(); i++) {
        slots[i] = slot_of[call.expert_of_row[i]];
    }
    LayerIds & ids = backend_.ids[call.tiers->slots().of({ call.layer, 0 })];
    slot_ids_ = ids.upload(backend_.inner, slots, call.n_used, call.n_tokens);
    if (slot_ids_ == nullptr) {
        set_error("no device memory for the slot ids of a batch");
        return GGML_STATUS_ALLOC_FAILED;
    }
    return GGML_STATUS_SUCCESS;
}

void LookedUpPath::redirect(ggml_tensor * node, const ExpertTensor & expert) {
    segments_.redirect(node, expert.tiers->slots().of(expert.ref), slot_ids_);
}

void LookedUpPath::defer() {
    if (pinned_) {
        try {
            backend_.deferred.add(std::move(pinned_));
        } catch (const std::bad_alloc &) { // the slots are still in `pinned_`, and end() waits for the backend
        }
    }
}

void LookedUpPath::end(bool backend_is_idle) {
    if (pinned_) {
        if (!backend_is_idle) {
            ggml_backend_synchronize(backend_.inner); // queued segments still read the slots
        }
        pinned_.release();
    }
}

} // namespace expertier
