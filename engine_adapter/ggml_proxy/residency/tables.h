// The policy's tables, which say which expert is in which slot and are shared with Python. Each operation here takes
// the layer's lock.
#pragma once

#include "abi/abi.h"
#include "residency/counters.h"
#include "residency/pinned_slots.h"
#include "residency/slot_tensors.h"

#include <atomic>
#include <deque>
#include <vector>

namespace expertier {

class ResidencyTables {
  public:
    ResidencyTables(const expertier_binding & binding, const SlotTensors & slots, Counters & counters);
    ResidencyTables(const ResidencyTables &) = delete;
    ResidencyTables & operator=(const ResidencyTables &) = delete;

    // For callers that take the layers' locks by themselves.
    const expertier_policy & policy() const { return policy_; }
    const int64_t * directory() const { return directory_; }
    void * locks() const { return locks_; }

    // Looks `experts` up, chooses slots for those that are missing and pins all of them, waiting for slots that are
    // held elsewhere. Returns how many are missing, with their places in `experts` in `miss_index`; below 0 after an
    // error, and then nothing is pinned.
    int32_t begin(int layer, const std::vector<int32_t> & experts, std::vector<int32_t> & slots,
                  std::vector<int32_t> & miss_index);
    // Ends the fill that begin() has begun. Other threads may find the experts afterwards, unless the fill failed.
    void end_fill(int layer, const std::vector<int32_t> & slots, bool is_filled);
    void release(int layer, const std::vector<int32_t> & slots, PinnedSlots::Bytes bytes);

    // Whether every expert of the layer is in the slot of its own number, and stays there, so that ids are slot ids.
    bool is_fully_resident(int layer);
    // Pins the slots of the experts that are resident, without counting that as a use by the policy. The slot of an
    // expert that is not resident is -1.
    std::vector<int32_t> pin_ready(int layer, const std::vector<int32_t> & experts);
    void release_held(int layer, std::vector<int32_t> & slots); // as pin_ready returned them
    // Reorders `experts` so that resident experts come first, because passes then evict as few experts as possible.
    void resident_first(int layer, std::vector<int32_t> & experts);

    // The version of the layer's table that the device has a copy of; below 0: the device has no valid copy.
    int32_t & device_version(int layer) { return layers_[layer].device_version; }

    // Takes over the tables after slots have moved; with no graph running.
    void take_layout(const expertier_binding & binding);

  private:
    struct Layer {
        std::atomic<bool> is_fully_resident{ false };
        int32_t device_version = -1;
    };

    const int64_t * directory_;
    void * locks_;
    expertier_policy policy_;
    bool sees_all_; // every call must be looked up here, because look-ups are being recorded
    const SlotTensors & slots_;
    Counters & counters_;
    std::deque<Layer> layers_; // a deque, so that their addresses stay
};

} // namespace expertier
