// Fetches experts that a layer to come is predicted to use, while earlier layers compute.
//
// All copies go through the look-up's stream of uploads, and at most two small pieces of prefetches are queued at a
// time: so the experts that a look-up turns out to lack never wait long behind them. A prefetch ends when its layer's
// look-up is served (prefetch/prefetch.h draws the states).
#pragma once

#include "lookup/device_lookup.h"
#include "prefetch/piece_events.h"
#include "prefetch/predictor.h"
#include "prefetch/prefetch.h"
#include "residency/tiers.h"

#include <array>
#include <cstdint>
#include <vector>

namespace expertier {

// The prefetches of one graph. Its owner holds the locks of all layers.
class PrefetchRun {
  public:
    PrefetchRun(Tiers & tiers, DeviceLookup & lookup, Predictor & predictor, const PieceEvents & events,
                size_t n_calls);
    ~PrefetchRun() { end(); }
    PrefetchRun(const PrefetchRun &) = delete;
    PrefetchRun & operator=(const PrefetchRun &) = delete;

    // The graph that has begun will predict `n_rows` experts of `layer`. To be called for all such layers in the order
    // of their look-ups, before anything is queued.
    void expect(int layer, int n_rows);
    // Queues a prediction of the next expected layer's experts behind the look-up that was queued last, for a router
    // `from`; false when the driver refused.
    bool queue(const Router & from, const Router & to, int64_t n_used);
    // A captured graph has queued every expected prediction at once, or (not `all`) none that `queue` was called for.
    void launched(bool all) { n_launched_ = all ? predictions_.size() : 0; }
    // Goes on with what is under way, without waiting. To be called often.
    void attend();
    // The layer's look-up has arrived with these distinct experts, and perhaps waits for an answer; prefetches for it
    // end. The slots of those that it wants are READY from here on, and hold the bytes once the stream of uploads has
    // been waited for.
    void arrive(int layer, const std::vector<int32_t> & experts, bool waits);
    // The caller has waited for the stream of uploads.
    void synchronized();
    // Waits until no slot of the layer is FILLING for a prefetch any more; false when none was.
    bool make_room(int layer);
    // Begins no prefetch any more, and waits until no copy is under way. Needed before a look-up goes on without its
    // experts: the engine's kernels may then read any slot.
    void stop();
    // Stops, and waits for predictions that are under way. All look-ups must have been answered, as predictions are
    // queued behind them. Where no look-up took a prediction, the layer's table on the device counts as old.
    void end();

  private:
    struct Wanted {
        int layer;
        int32_t expert, slot, evicted; // evicted: the expert that leaves the slot; -1: the slot is FREE
    };
    struct Prediction { // that is expected
        int layer;
        int n_rows;
        std::array<int32_t, Predictor::n_candidates> slots, experts; // its candidates
    };

    void read_predictions();
    Prefetch * next();
    Prefetch * begin(const Wanted & wanted);
    void queue_piece(Prefetch & prefetch, bool is_paced);
    void finish_complete();
    void end_at_lookup(Prefetch & prefetch, bool is_used);
    void complete_fill(const Prefetch & prefetch);
    void restore(const Wanted & wanted);
    void count(const Prediction & prediction, const std::vector<int32_t> & experts);
    void note_version(int layer);

    Tiers & tiers_;
    DeviceLookup & lookup_;
    Predictor & predictor_;
    const PieceEvents & events_;
    std::vector<Prediction> predictions_;
    size_t n_launched_ = 0;      // predictions that are queued
    size_t n_ended_ = 0;         // predictions whose look-ups have arrived
    size_t n_read_ = 0;          // predictions that have arrived and were read
    std::vector<Wanted> wanted_; // in the order of `predictions_`, the likeliest expert of each first
    std::array<Prefetch, size_t{ 4 } * Predictor::most_chosen> prefetches_;
    uint64_t n_queued_ = 0, n_done_ = 0; // paced pieces
    bool is_stopped_ = false;
    bool has_uploads_ = false; // something was queued since the stream of uploads was waited for
    std::vector<int32_t> evicted_;
};

} // namespace expertier
