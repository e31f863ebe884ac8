// Fetches experts that a layer to come is predicted to use, while this layer computes.
//
// All copies go through the look-up's stream of uploads, and never more than two small pieces of a prefetch are queued
// at a time: so what a look-up turns out to wait for is never far behind. When the layer's look-up is served, each
// prefetch ends: asked for and not complete: the rest is queued at once, and the look-up waits for it as for any other
// fill; not asked for and not complete: it is given up, and its slot is FREE.
#pragma once

#include "lookup/device_lookup.h"
#include "residency/pool_copies.h"
#include "prefetch/predictor.h"
#include "residency/tiers.h"

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace expertier {

// What is the same for all graphs: made once, with the device look-up.
class PrefetchEvents {
  public:
    static constexpr size_t n = 2;                      // pieces that are queued at a time
    explicit PrefetchEvents(ggml_backend_dev_t device); // throws std::runtime_error when the device gives none
    ggml_backend_event_t operator[](uint64_t piece) const { return events_[piece % n].get(); }

  private:
    struct Free {
        void operator()(ggml_backend_event_t event) const { ggml_backend_event_free(event); }
    };
    std::array<std::unique_ptr<ggml_backend_event, Free>, n> events_;
};

// Of one graph; whoever has it holds all layers' locks.
class PrefetchRun {
  public:
    PrefetchRun(Tiers & tiers, DeviceLookup & lookup, Predictor & predictor, const PrefetchEvents & events,
                size_t n_calls);
    ~PrefetchRun() { end(); }
    PrefetchRun(const PrefetchRun &) = delete;
    PrefetchRun & operator=(const PrefetchRun &) = delete;

    // The graph that has begun will predict `n_rows` experts of `layer`. To be called for all such layers in the order
    // of their look-ups, before anything is queued.
    void expect(int layer, int n_rows);
    // Has the experts of the next expected layer predicted behind the look-up that was queued last, for a router
    // `from`; false when the driver refused.
    bool queue(const Router & from, const Router & to, int64_t n_used);
    // All that was expected has been queued at once; or nothing of what `queue` was called for.
    void launched(bool all) { n_launched_ = all ? predictions_.size() : 0; }
    // Goes on with what is under way, without waiting. To be called often.
    void attend();
    // The layer's look-up has arrived with these distinct experts, and perhaps waits; prefetches for it end. What was
    // asked for is READY from here on, and there once the stream of uploads has been waited for.
    void arrive(int layer, const std::vector<int32_t> & experts, bool waits);
    // Somebody has waited for the stream of uploads.
    void synchronized();
    // Waits until no slot of the layer is FILLING for a prefetch any more; false when none was.
    bool make_room(int layer);
    // Begins no prefetch any more, and waits until no copy is under way. Needed before a look-up goes on without its
    // experts: the engine's kernels may then read any slot.
    void stop();
    // Stops, and waits for predictions that are under way. All look-ups must have been answered. Where a prediction was
    // not taken, the layer's table on the device counts as old.
    void end();

  private:
    // copying ─ its last piece is queued ─► queued ─ complete ─► landed ─ its layer's look-up has arrived ─► none
    //    │                                    └ asked for before that ─► arriving ─ complete ─► none
    //    └ not asked for ─► dropped ─ complete ─► none
    enum class State { none, copying, queued, landed, arriving, dropped };
    struct Prefetch {
        State state = State::none;
        int layer = -1;
        int32_t expert = -1, slot = -1;
        bool is_over = false; // its layer's look-up has arrived
        const char * copy = nullptr;
        HostReads reads;
        size_t piece = 0, offset = 0; // what is to be queued next
        int64_t n_bytes = 0;          // that were queued
        uint64_t last = 0;            // the number of its last piece
    };
    struct Wanted {
        int layer;
        int32_t expert, slot, leaves;
    };
    struct Prediction { // that was queued
        int layer;
        int n_rows;
        std::array<int32_t, Predictor::n_candidates> slots, experts; // its candidates
    };

    void take();
    Prefetch * next();
    Prefetch * begin(const Wanted & wanted);
    void queue_piece(Prefetch & prefetch, bool is_paced);
    void land();
    void end_at_lookup(Prefetch & prefetch, bool is_used);
    void restore(const Wanted & wanted);
    void count(const Prediction & prediction, const std::vector<int32_t> & experts);
    void note_version(int layer);

    Tiers & tiers_;
    DeviceLookup & lookup_;
    Predictor & predictor_;
    const PrefetchEvents & events_;
    std::vector<Prediction> predictions_;
    size_t n_launched_ = 0;
    size_t n_ended_ = 0;         // predictions whose look-ups have arrived
    size_t n_taken_ = 0;         // that have arrived themselves
    std::vector<Wanted> wanted_; // in that order, of each the likeliest first
    std::array<Prefetch, size_t{ 4 } * Predictor::most_chosen> prefetches_;
    uint64_t n_queued_ = 0, n_done_ = 0; // paced pieces
    bool is_stopped_ = false;
    bool is_dirty_ = false; // something was queued since the uploads were waited for
    std::vector<int32_t> evicted_;
};

} // namespace expertier
