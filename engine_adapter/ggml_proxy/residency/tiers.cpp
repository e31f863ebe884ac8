#include "residency/tiers.h"

#include "backend/device.h"
#include "graph/prefill_stream.h"
#include "lookup/device_lookup.h"
#include "prefetch/predictor.h"
#include "prefetch/run.h"
#include "residency/errors.h"

#include <stdexcept>

namespace expertier {

Tiers::Tiers(const expertier_binding & binding, ProxyDevice & device)
    : device_(device), sees_all_(binding.sees_all != 0), stream_tokens_(binding.stream_tokens),
      host_copies_(binding.host_copies), slots_(binding, device.inner), placement_(binding, slots_),
      tables_(binding, slots_, counters), misses_(binding, slots_, tables_, host_copies_, counters) {
    std::vector<int64_t> first;
    for (int i = 0; i < binding.n_layers; i++) {
        first.push_back(binding.layers[i].first_copy);
    }
    host_copies_.set_first(std::move(first));
    if (stream_tokens_ > 0) {
        prefill_stream_ = std::make_unique<PrefillStream>(*this, binding, device.inner);
    }
}

Tiers::~Tiers() = default;

std::string Tiers::open_device_lookup(const expertier_device_lookup & driver) {
    if (sees_all_) {
        throw std::runtime_error("every look-up is being recorded, and that is done on the host");
    }
    std::vector<int> n_experts;
    for (int layer = 0; layer < slots_.n_layers(); layer++) {
        n_experts.push_back(slots_.n_experts(layer));
    }
    device_lookup_ = std::make_unique<DeviceLookup>(driver, device_.inner, n_experts);
    std::string without;
    if (const std::string problem = device_lookup_->try_capture(device_.inner); !problem.empty()) {
        without += "capture\t" + problem + "\n";
    }
    if (driver.predict == nullptr || driver.layers_ahead <= 0) {
        return without;
    }
    try {
        piece_events_ = std::make_unique<PieceEvents>(device_.inner);
        predictor_ = std::make_unique<Predictor>(*device_lookup_, device_.inner, n_experts);
    } catch (const std::runtime_error & problem) { // look-ups work without predictions
        piece_events_.reset();
        without += std::string("prefetch\t") + problem.what() + "\n";
    }
    return without;
}

ggml_backend_buffer_type_t Tiers::buffer_type() const { return &device_.experts; }

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
