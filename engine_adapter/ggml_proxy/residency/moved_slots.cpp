// Moves of slots, as the tiers see them: Python moves the slots, and the tensors and tables here follow, so that graphs
// read from the new places.

#include "slab/compute_region.h"
#include "slab/queued_moves.h"
#include "residency/tiers.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <stdexcept>

namespace expertier {

namespace {

constexpr size_t slot_alignment = 128; // compute buffers begin and end at multiples of it

} // namespace

std::shared_ptr<ComputeRegion> Tiers::new_compute_region(const expertier_compute & compute, ProxyDevice & device) {
    if (slots_.is_host_memory() && compute.most_bytes > 0) {
        throw std::runtime_error("the slab is in host memory, but the engine's compute buffers are not");
    }
    if (compute.most_bytes > 0 && ggml_backend_buffer_get_base(slots_.slab()) != slots_.slab_base()) {
        throw std::runtime_error("the slab does not begin at the base of its device buffer");
    }
    if (const auto moves = find_moves_of(slots_.slab())) {
        moves->prepare(); // where this fails, the first move tries again and reports the failure
    }
    const size_t alignment = std::max(slot_alignment, ggml_backend_buft_get_alignment(slots_.slab()->buft));
    return std::make_shared<ComputeRegion>(compute, *this, device, slots_.slab(), alignment);
}

bool Tiers::move(const expertier_compute & compute, uint64_t compute_bytes, std::string & failure) {
    int32_t done = 0;
    bool is_served;
    {
        const Misses::Running running(misses_);
        is_served = misses_.serves_fills();
        if (is_served) {
            compute.move(compute.context, compute_bytes, &done);
            tables_.take_layout(*compute.binding);
            slots_.take_layout(*compute.binding);
        }
    }
    if (done != EXPERTIER_FILLED) {
        failure = "the slots could not make room for " + std::to_string(compute_bytes) +
                  " bytes of the engine's compute buffers";
        if (!is_served) {
            failure += ": misses and moves are refused while the engine starts or ends";
        }
    }
    return done == EXPERTIER_FILLED;
}

bool Tiers::wants_other_slots(const expertier_compute & compute) {
    int32_t wants = 0;
    const Misses::Running running(misses_);
    if (misses_.serves_fills()) {
        compute.look(compute.context, &wants);
    }
    return wants == 1;
}

void Tiers::note_missed(int layer, int64_t n_experts) {
    if (region_) {
        region_->note_missed(n_experts * slots_.expert_bytes(layer));
    }
}

} // namespace expertier
