// Slots that are pinned: while the object lives, no expert in them is evicted.
#pragma once

#include "residency/pool_copies.h"

#include <cstdint>
#include <utility>
#include <vector>

namespace expertier {

class ResidencyTables;

// Slots of one layer that are pinned while this lives, and the host copies that queued fills of them read.
class PinnedSlots {
  public:
    enum class Bytes {
        there,
        queued, // their copies are queued on one stream; no other stream may find the experts before these are done
        zero_filled, // some slots hold zeros, so no other thread may ever find the experts there
    };

    PinnedSlots() = default;
    PinnedSlots(ResidencyTables & tables, int layer, std::vector<int32_t> && slots, Bytes bytes,
                HostReads && reads = {})
        : tables_(&tables), layer_(layer), bytes_(bytes), slots_(std::move(slots)), reads_(std::move(reads)) {}
    ~PinnedSlots() { release(); }
    PinnedSlots(PinnedSlots && other) noexcept { *this = std::move(other); }
    PinnedSlots & operator=(PinnedSlots && other) noexcept {
        release();
        tables_ = other.tables_;
        layer_ = other.layer_;
        bytes_ = other.bytes_;
        slots_ = std::move(other.slots_);
        reads_ = std::move(other.reads_);
        other.tables_ = nullptr;
        return *this;
    }

    explicit operator bool() const { return tables_ != nullptr; }
    // The slot of each acquired expert, in the experts' order.
    const std::vector<int32_t> & slots() const { return slots_; }
    // To be called once no queued work reads the slots any more.
    void release();

  private:
    ResidencyTables * tables_ = nullptr;
    int layer_ = -1;
    Bytes bytes_ = Bytes::there;
    std::vector<int32_t> slots_;
    HostReads reads_;
};

} // namespace expertier
