#include "graph/paths/streamed.h"

#include <numeric>

namespace expertier {

bool StreamedPath::is_large_batch(const ExpertCall & call) {
    const Tiers & tiers = *call.tiers;
    return tiers.prefill_stream() && call.n_tokens >= tiers.stream_tokens() &&
           tiers.slots().n_slots(call.layer) < tiers.slots().n_experts(call.layer);
}

ggml_status StreamedPath::begin(ExpertCall & call) {
    Tiers & tiers = *call.tiers;
    if (call.experts.empty()) { // the router's ids have not been read
        call.experts.resize(tiers.slots().n_experts(call.layer));
        std::iota(call.experts.begin(), call.experts.end(), 0);
    }
    if (!is_large_batch(call)) {
        tiers.note_missed(call.layer, (int64_t) call.experts.size()); // with more slots they would have been resident
    }
    if (!use_) {
        use_.emplace(*tiers.prefill_stream(), backend_.inner);
        backend_.streamed = call.tiers;
    }
    return use_->bring(call.layer, call.experts) ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

void StreamedPath::redirect(ggml_tensor * node, const ExpertTensor & expert) {
    segments_.redirect(node, use_->matrix(expert.ref.matrix), node->src[2]);
}

} // namespace expertier
