// A model's tiers as the proxy sees them: the object that the rooms above call, made of the classes of this room.
#pragma once

#include "abi/abi.h"
#include "residency/counters.h"
#include "residency/misses.h"
#include "residency/placement.h"
#include "residency/pool_copies.h"
#include "residency/slot_tensors.h"
#include "residency/tables.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace expertier {

struct ProxyDevice;

// Of the rooms above, which make these and hand them in.
class ComputeRegion;
class DeviceLookup;
class PieceEvents;
class Predictor;
class PrefillStream;

// What tiers need to know of the device that they are bound to.
struct TierDevice {
    ggml_backend_dev_t inner;            // the real device
    ggml_backend_buffer_type_t experts;  // the buffer type in which the engine places expert tensors
    const std::atomic<int> & n_backends; // how many streams may use the slots at the same time
};

class Tiers {
  public:
    // Copies the binding; throws std::runtime_error when it cannot be used on `device`.
    Tiers(const expertier_binding & binding, const TierDevice & device);
    Tiers(const Tiers &) = delete;
    Tiers & operator=(const Tiers &) = delete;

    Counters counters;

    const SlotTensors & slots() const { return slots_; }
    Placement & placement() { return placement_; }
    ResidencyTables & tables() { return tables_; }
    Misses & misses() { return misses_; }
    HostCopies & host_copies() { return host_copies_; }

    // The buffer type in which the engine places expert tensors of these tiers.
    ggml_backend_buffer_type_t buffer_type() const { return device_.experts; }
    // Whether every look-up is recorded, which is done on the host.
    bool sees_all() const { return sees_all_; }

    // Makes `experts` (distinct, at most n_slots) resident for what is queued on `stream` from now on, filling misses,
    // and pins their slots. Empty after an error, which take_error() returns.
    PinnedSlots acquire(ggml_backend_t stream, int layer, const std::vector<int32_t> & experts);

    // Streams layers past the slots for large batches; null when no layers are to be streamed.
    PrefillStream * prefill_stream() const { return prefill_stream_.get(); }
    int32_t stream_tokens() const { return stream_tokens_; } // a batch of so many tokens is large; 0: none is
    void stream_through(std::shared_ptr<PrefillStream> stream) { prefill_stream_ = std::move(stream); }

    // Looks up ids on the device; null when ids are looked up on the host only.
    DeviceLookup * device_lookup() const { return device_lookup_.get(); }
    void look_up_with(std::shared_ptr<DeviceLookup> lookup) { device_lookup_ = std::move(lookup); }
    // Predicts the experts that the next look-ups will ask for; null when nothing is predicted.
    Predictor * predictor() const { return predictor_.get(); }
    const PieceEvents & piece_events() const { return *piece_events_; }
    void predict_with(std::shared_ptr<Predictor> predictor, std::shared_ptr<PieceEvents> events) {
        piece_events_ = std::move(events);
        predictor_ = std::move(predictor);
    }

    // Has Python move the boundary (expertier_move), and takes over where the slots lie afterwards. Returns false and
    // sets `failure` after an error. With no graph running.
    bool move(const expertier_compute & compute, uint64_t compute_bytes, std::string & failure);
    bool wants_other_slots(const expertier_compute & compute); // asks Python (expertier_look)
    std::shared_ptr<ComputeRegion> new_compute_region(const expertier_compute & compute, ProxyDevice & device);
    void count_misses_for(std::shared_ptr<ComputeRegion> region) { region_ = std::move(region); }
    void note_missed(int layer, int64_t n_experts);

  private:
    TierDevice device_;
    bool sees_all_; // every call must be looked up on the host, because look-ups are being recorded
    int32_t stream_tokens_;
    HostCopies host_copies_;
    SlotTensors slots_;
    Placement placement_;
    ResidencyTables tables_;
    Misses misses_;
    std::shared_ptr<PrefillStream> prefill_stream_;
    std::shared_ptr<DeviceLookup> device_lookup_;
    std::shared_ptr<ComputeRegion> region_;
    std::shared_ptr<PieceEvents> piece_events_;
    std::shared_ptr<Predictor> predictor_;
};

} // namespace expertier
