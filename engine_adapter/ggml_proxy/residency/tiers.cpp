#include "residency/tiers.h"

#include "residency/errors.h"

namespace expertier {

Tiers::Tiers(const expertier_binding & binding, const TierDevice & device)
    : device_(device), sees_all_(binding.sees_all != 0), stream_tokens_(binding.stream_tokens),
      host_copies_(binding.host_copies), slots_(binding, device.inner), placement_(binding, slots_),
      tables_(binding, slots_, counters), misses_(binding, slots_, tables_, host_copies_, counters) {
    std::vector<int64_t> first;
    for (int i = 0; i < binding.n_layers; i++) {
        first.push_back(binding.layers[i].first_copy);
    }
    host_copies_.set_first(std::move(first));
}

PinnedSlots Tiers::acquire(ggml_backend_t stream, int layer, const std::vector<int32_t> & experts) {
    const int32_t n = (int32_t) experts.size();
    std::vector<int32_t> slots(n), miss_index(n), missing(n), targets(n); // after `begin` no allocation may fail
    HostReads reads(host_copies_, n);
    Misses::FillRoom room(n);

    const int32_t n_misses = tables_.begin(layer, experts, slots, miss_index);
    if (n_misses < 0) {
        return {};
    }
    if (n_misses > 0) {
        for (int32_t i = 0; i < n_misses; i++) {
            missing[i] = experts[miss_index[i]];
            targets[i] = slots[miss_index[i]];
        }
        missing.resize(n_misses);
        targets.resize(n_misses);
        note_missed(layer, n_misses);
        const Misses::Filled filled = misses_.fill(stream, layer, missing, targets, reads, room);
        if (filled == Misses::Filled::zeros) {
            return PinnedSlots(tables_, layer, std::move(slots), PinnedSlots::Bytes::zero_filled);
        }
        if (!reads.empty() && filled == Misses::Filled::yes &&
            device_.n_backends == 1) { // no other stream can read the slots before the copies are done
            return PinnedSlots(tables_, layer, std::move(slots), PinnedSlots::Bytes::queued, std::move(reads));
        }
        if (!reads.empty()) {
            ggml_backend_synchronize(stream); // from end_fill() on, another stream may read or overwrite the slots
        }
        tables_.end_fill(layer, slots, filled == Misses::Filled::yes);
        if (filled == Misses::Filled::no) {
            set_error("layer " + std::to_string(layer) + ": expert bytes could not be read");
            return {};
        }
    }
    return PinnedSlots(tables_, layer, std::move(slots), PinnedSlots::Bytes::there, std::move(reads));
}

} // namespace expertier
