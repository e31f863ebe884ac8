// Tiers whose slots move: what Python has decided becomes what graphs are pointed at.

#include "slab/compute_region.h"
#include "backend/device.h"
#include "slab/queued_moves.h"
#include "residency/tiers.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <stdexcept>

namespace expertier {

namespace {

constexpr size_t slot_alignment = 128; // of what the slots leave

} // namespace

std::shared_ptr<ComputeRegion> Tiers::new_compute_region(const expertier_compute & compute) {
    if (wrapped_slab_ && compute.most_bytes > 0) {
        throw std::runtime_error("the slab is in host memory, where the engine computes by itself");
    }
    if (compute.most_bytes > 0 && ggml_backend_buffer_get_base(slab_) != slab_base_) {
        throw std::runtime_error("the slab does not begin where the device's memory for it does");
    }
    if (const auto moves = find_moves_of(slab_)) {
        moves->prepare(); // else the first move tries again, and tells
    }
    const size_t alignment = std::max(slot_alignment, ggml_backend_buft_get_alignment(slab_->buft));
    return std::make_shared<ComputeRegion>(compute, *this, device_, slab_, alignment);
}

bool Tiers::move(const expertier_compute & compute, uint64_t compute_bytes, std::string & failure) {
    int32_t done = 0;
    fills_running_ += 1; // see set_fills()
    const bool is_served = serves_fills();
    if (is_served) {
        compute.move(compute.context, compute_bytes, &done);
        take_layout(*compute.binding);
    }
    fills_running_ -= 1;
    if (done != EXPERTIER_FILLED) {
        failure = "the slots could not make room for " + std::to_string(compute_bytes) + " bytes to compute in";
        if (!is_served) {
            failure += ": misses and moves are refused while the engine starts or ends";
        }
    }
    return done == EXPERTIER_FILLED;
}

bool Tiers::wants_other_slots(const expertier_compute & compute) {
    int32_t wants = 0;
    fills_running_ += 1; // see set_fills()
    if (serves_fills()) {
        compute.look(compute.context, &wants);
    }
    fills_running_ -= 1;
    return wants == 1;
}

void Tiers::take_layout(const expertier_binding & binding) {
    directory_ = binding.directory;
    for (size_t i = 0; i < layers_.size(); i++) {
        const expertier_layer & from = binding.layers[i];
        Layer & layer = layers_[i];
        layer.n_slots = from.n_slots;
        layer.copies.assign(from.copies, from.copies + from.n_copies);
        layer.is_fully_resident = false;
        layer.device_table_version = -1;
        for (size_t j = 0; j < layer.slots.size(); j++) {
            ggml_tensor * slots = layer.slots[j];
            slots->ne[2] = from.n_slots;
            slots->nb[3] = slots->nb[2] * from.n_slots;
            slots->data = static_cast<char *>(slab_base_) + from.matrices[j].offset;
        }
    }
    epoch_ += 1;
}

void Tiers::note_missed(int layer, int64_t n_experts) {
    if (region_) {
        int64_t n_bytes = 0;
        for (const expertier_copy & piece : layers_[layer].copies) {
            n_bytes += (int64_t) piece.n_bytes;
        }
        region_->note_missed(n_experts * n_bytes);
    }
}

} // namespace expertier
