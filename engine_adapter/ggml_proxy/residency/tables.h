// The policy's tables of which expert is in which slot, shared with Python, and what is done with them under a layer's lock.
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

    // For whoever holds the layers' locks by itself.
    const expertier_policy & policy() const { return policy_; }
    const int64_t * directory() const { return directory_; }
    void * locks() const { return locks_; }

    // Looks `experts` up, chooses slots for those that are missing and pins all of them, waiting for slots that are held
    // elsewhere. Returns how many are missing, with their places in `experts` in `miss_index`; below 0 after an error,
    // and then nothing is pinned.
    int32_t begin(int layer, const std::vector<int32_t> & experts, std::vector<int32_t> & slots,
                  std::vector<int32_t> & miss_index);
    // Ends the fill that begin() has begun: other threads may find the experts, or none of them where it failed.
    void end_fill(int layer, const std::vector<int32_t> & slots, bool is_filled);
    void release(int layer, const std::vector<int32_t> & slots, PinnedSlots::Bytes bytes);

    // Whether every expert of the layer is in the slot of its own number, and stays there: ids are slot ids then.
    bool is_fully_resident(int layer);
    // Pins the slots of those of `experts` that are resident, which is no use of them; -1 for the others.
    std::vector<int32_t> pin_ready(int layer, const std::vector<int32_t> & experts);
    void release_held(int layer, std::vector<int32_t> & slots); // as pin_ready returned them
    // Reorders `experts` so that the resident ones come first: passes then evict as little as they can.
    void resident_first(int layer, std::vector<int32_t> & experts);

    // Of the copy of a layer's table on the device; below 0: it has none that is right.
    int32_t & device_version(int layer) { return layers_[layer].device_version; }

    // The slots have moved, and the tables with them; with no graph running.
    void take_layout(const expertier_binding & binding);

  private:
    struct Layer {
        std::atomic<bool> is_fully_resident{ false };
        int32_t device_version = -1;
    };

    const int64_t * directory_;
    void * locks_;
    expertier_policy policy_;
    bool sees_all_; // every look-up is recorded
    const SlotTensors & slots_;
    Counters & counters_;
    std::deque<Layer> layers_; // they do not move
};

} // namespace expertier
