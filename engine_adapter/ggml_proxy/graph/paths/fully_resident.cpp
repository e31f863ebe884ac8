#include "graph/paths/fully_resident.h"

namespace expertier {

void FullyResidentPath::redirect(ggml_tensor * node, const ExpertTensor & expert) {
    ggml_tensor * ids = node->src[2];
    segments_.redirect(node, expert.tiers->slots().of(expert.ref), ids);
    expert.tiers->counters.fully_resident_calls += ids != counted_;
    counted_ = ids;
}

} // namespace expertier
