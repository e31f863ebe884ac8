// A model's tiers as the proxy sees them: what the rooms above ask for, put together from the classes of this room.
#pragma once

#include "abi/abi.h"
#include "residency/counters.h"
#include "residency/misses.h"
#include "residency/placement.h"
#include "residency/pool_copies.h"
#include "residency/slot_tensors.h"
#include "residency/tables.h"

#include <memory>
#include <string>
#include <vector>

namespace expertier {

struct ProxyDevice;

class ComputeRegion;
class DeviceLookup;
class PieceEvents;
class Predictor;
class PrefillStream;

class Tiers {
  public:
    // Copies the binding; throws std::runtime_error when it cannot be used on `device`.
    Tiers(const expertier_binding & binding, ProxyDevice & device);
    ~Tiers();
    Tiers(const Tiers &) = delete;
    Tiers & operator=(const Tiers &) = delete;

    Counters counters;

    const SlotTensors & slots() const { return slots_; }
    Placement & placement() { return placement_; }
    ResidencyTables & tables() { return tables_; }
    Misses & misses() { return misses_; }
    HostCopies & host_copies() { return host_copies_; }

    // What expert tensors of these tiers are placed in.
    ggml_backend_buffer_type_t buffer_type() const;

    // Makes `experts` (distinct, at most n_slots) resident for what is queued on `stream` from now on, and pins their
    // slots; fills misses. Empty after an error, which take_error() then tells.
    PinnedSlots acquire(ggml_backend_t stream, int layer, const std::vector<int32_t> & experts);

    // The layers that pass by in large batches; null when they are not to.
    PrefillStream * prefill_stream() const { return prefill_stream_.get(); }
    int32_t stream_tokens() const { return stream_tokens_; } // from so many on

    // Looks up ids on the device; null when there is none.
    DeviceLookup * device_lookup() const { return device_lookup_.get(); }
    // Empty, or a line for each part that was asked for and does not work: its name, a tab, and why. Throws
    // std::runtime_error when the look-up itself does not work.
    std::string open_device_lookup(const expertier_device_lookup & driver);
    // Predicts what the next look-ups will ask for; null when there is none.
    Predictor * predictor() const { return predictor_.get(); }
    const PieceEvents & piece_events() const { return *piece_events_; }

    // Has Python move the boundary (expertier_move) and takes over where the slots lie then; false and `failure` set
    // after an error. With no graph running.
    bool move(const expertier_compute & compute, uint64_t compute_bytes, std::string & failure);
    bool wants_other_slots(const expertier_compute & compute); // asks Python (expertier_look)
    std::shared_ptr<ComputeRegion> new_compute_region(const expertier_compute & compute);
    void count_misses_for(std::shared_ptr<ComputeRegion> region) { region_ = std::move(region); }
    void note_missed(int layer, int64_t n_experts);

  private:
    ProxyDevice & device_;
    bool sees_all_; // every look-up is recorded
    int32_t stream_tokens_;
    HostCopies host_copies_;
    SlotTensors slots_;
    Placement placement_;
    ResidencyTables tables_;
    Misses misses_;
    std::unique_ptr<PrefillStream> prefill_stream_;
    std::unique_ptr<DeviceLookup> device_lookup_;
    std::shared_ptr<ComputeRegion> region_;
    std::unique_ptr<PieceEvents> piece_events_;
    std::unique_ptr<Predictor> predictor_;
};

} // namespace expertier
