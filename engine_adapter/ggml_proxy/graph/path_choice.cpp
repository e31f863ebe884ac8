#include "graph/path_choice.h"

namespace expertier {

namespace {

// With so many rows for each expert on average, the router has probably chosen every expert: all of them are streamed,
// and no ids are read.
constexpr int64_t rows_an_expert = 4;

} // namespace

LayerPath * PathChoice::by_layer(const ExpertTensor & expert) {
    return expert.tiers->tables().is_fully_resident(expert.ref.layer) ? &fully_resident_ : nullptr;
}

LayerPath * PathChoice::by_rows(const ExpertCall & call) {
    const int64_t n_rows = call.n_tokens * call.n_used;
    if (StreamedPath::is_large_batch(call) && n_rows >= rows_an_expert * call.tiers->slots().n_experts(call.layer)) {
        return &streamed_;
    }
    return nullptr;
}

LayerPath & PathChoice::by_experts(const ExpertCall & call) {
    const bool fits = (int) call.experts.size() <= call.tiers->slots().n_slots(call.layer);
    if (StreamedPath::is_large_batch(call) || (!fits && call.tiers->prefill_stream())) {
        return streamed_;
    }
    if (!fits) {
        return passes_;
    }
    return looked_up_;
}

} // namespace expertier
