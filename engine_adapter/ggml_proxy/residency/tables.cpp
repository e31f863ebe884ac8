#include "residency/tables.h"

#include "residency/errors.h"
#include "residency/layer_lock.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <string>

namespace expertier {

namespace {

// How long a call waits for slots that other threads hold before it gives up with an error.
constexpr int wait_limit_s = 60;

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

} // namespace

ResidencyTables::ResidencyTables(const expertier_binding & binding, const SlotTensors & slots, Counters & counters)
    : directory_(binding.directory), locks_(binding.locks), policy_(binding.policy), sees_all_(binding.sees_all != 0),
      slots_(slots), counters_(counters), layers_(binding.n_layers) {}

int32_t ResidencyTables::begin(int layer, const std::vector<int32_t> & experts, std::vector<int32_t> & slots,
                               std::vector<int32_t> & miss_index) {
    const std::string where = "layer " + std::to_string(layer);
    timespec deadline;
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += wait_limit_s;

    LayerLock lock(locks_, layer);
    for (;;) {
        const int64_t start = now_ns();
        const int32_t status =
            policy_.begin(directory_, layer, experts.data(), (int32_t) experts.size(), slots.data(), miss_index.data());
        counters_.lookup_ns += now_ns() - start;
        counters_.lookups += 1;
        switch (status) {
        case EXPERTIER_BUSY:
            if (lock.wait_until(deadline)) {
                continue;
            }
            set_error(where + ": other threads held its slots for " + std::to_string(wait_limit_s) +
                      " s; release leases before running the engine");
            return status;
        case EXPERTIER_TOO_MANY:
            set_error(where + ": a graph asked for " + std::to_string(experts.size()) +
                      " experts at once, but the layer has " + std::to_string(slots_.n_slots(layer)) + " slots");
            return status;
        case EXPERTIER_BAD_EXPERT:
            set_error(where + ": a graph asked for an expert outside 0.." +
                      std::to_string(slots_.n_experts(layer) - 1));
            return status;
        case EXPERTIER_BAD_CALL:
            set_error(where + ": the residency tables are of another version of expertier; restart the process");
            return status;
        default:
            return status;
        }
    }
}

void ResidencyTables::end_fill(int layer, const std::vector<int32_t> & slots, bool is_filled) {
    LayerLock lock(locks_, layer);
    const auto end = is_filled ? policy_.complete : policy_.abort;
    if (end(directory_, layer, slots.data(), (int32_t) slots.size()) < 0) {
        set_error("layer " + std::to_string(layer) + ": the residency tables refused the end of a fill");
    }
    lock.notify_all();
}

void ResidencyTables::release(int layer, const std::vector<int32_t> & slots, PinnedSlots::Bytes bytes) {
    LayerLock lock(locks_, layer);
    const int32_t n = (int32_t) slots.size();
    if (bytes == PinnedSlots::Bytes::queued && policy_.complete(directory_, layer, slots.data(), n) < 0) {
        set_error("layer " + std::to_string(layer) + ": the residency tables refused the end of a fill");
    }
    const auto end = bytes == PinnedSlots::Bytes::zero_filled ? policy_.abort : policy_.release;
    if (end(directory_, layer, slots.data(), n) < 0) {
        set_error("layer " + std::to_string(layer) + ": the residency tables refused the release of slots");
    }
    lock.notify_all();
}

void PinnedSlots::release() {
    if (tables_) {
        tables_->release(layer_, slots_, bytes_);
        tables_ = nullptr;
    }
    reads_.release();
}

bool ResidencyTables::is_fully_resident(int layer) {
    Layer & self = layers_[layer];
    if (self.is_fully_resident) {
        return true;
    }
    if (sees_all_ || slots_.n_slots(layer) < slots_.n_experts(layer)) {
        return false;
    }
    LayerLock lock(locks_, layer);
    self.is_fully_resident = policy_.is_fully_resident(directory_, layer) == 1;
    return self.is_fully_resident;
}

std::vector<int32_t> ResidencyTables::pin_ready(int layer, const std::vector<int32_t> & experts) {
    std::vector<int32_t> slots(experts.size(), -1);
    LayerLock lock(locks_, layer);
    if (policy_.pin_ready(directory_, layer, experts.data(), (int32_t) experts.size(), slots.data()) < 0) {
        slots.assign(experts.size(), -1); // nothing was pinned
    }
    return slots;
}

void ResidencyTables::release_held(int layer, std::vector<int32_t> & slots) {
    slots.erase(std::remove(slots.begin(), slots.end(), -1), slots.end());
    release(layer, slots, PinnedSlots::Bytes::there);
}

void ResidencyTables::resident_first(int layer, std::vector<int32_t> & experts) {
    LayerLock lock(locks_, layer);
    policy_.resident_first(directory_, layer, experts.data(), (int32_t) experts.size());
}

void ResidencyTables::take_layout(const expertier_binding & binding) {
    directory_ = binding.directory;
    for (Layer & layer : layers_) {
        layer.is_fully_resident = false;
        layer.device_version = -1;
    }
}

} // namespace expertier
