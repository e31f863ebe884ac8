// A decode graph with its look-ups on its way to the device: captured and launched at once, or part by part. What comes of the
// look-ups is for others to serve (lookup/run.cpp).
#pragma once

#include "prefetch/run.h"
#include "backend/backend.h"
#include "lookup/device_lookup.h"
#include "graph/segments.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace expertier {

// Of one run of a graph; its methods are called in this order, with all layers' locks held but for the first one.
class LookupQueue {
  public:
    LookupQueue(ProxyBackend & backend, ggml_cgraph * graph);
    ~LookupQueue();
    LookupQueue(const LookupQueue &) = delete;
    LookupQueue & operator=(const LookupQueue &) = delete;

    static bool can_capture(const LookupPlan & plan);

    // Which layers have a slot for every expert, and need no look-up. Takes each layer's lock meanwhile.
    void look_at_layers();
    bool is_fully_resident(size_t call) const { return is_fully_resident_[call]; }

    // Of the hidden states that predictions take; 0: nothing can be predicted.
    size_t n_predicted_floats() const;
    // From here on what can be predicted is, and `ahead` is told.
    void predict(PrefetchRun & ahead) { prefetch_run_ = &ahead; }

    // What the look-ups of this graph are; false when there is no memory for the slot ids of one.
    bool find_lookups();
    // Tells the look-up and whoever fetches ahead what the graph that has begun will ask for.
    void expect();
    // Launches the graph with all of its look-ups at once, captured before or now; false when it is to be queued instead.
    bool launch_captured();
    // Queues it part by part; `after_lookup` is called behind each look-up.
    ggml_status queue_all(const std::function<void()> & after_lookup);

    // Whose look-ups are queued, in that order.
    const std::vector<int> & layers() const { return queued_; }

  private:
    // A call that goes through its look-up.
    struct Step {
        size_t call;
        const ggml_tensor * ids;
        ggml_tensor * slot_ids;
        size_t next = 1, last = 0; // calls that are predicted behind it, as far as they can be
        SavedRows saved;
    };

    // The calls that are to be predicted by call `i`, first and last; the first call does so for all those close by.
    std::pair<size_t, size_t> predicted_by(size_t i) const;
    // Whether experts of call `to` can be predicted at call `from`, and there are slots for more than it uses.
    bool can_predict(size_t from, size_t to) const;
    // Whether a step's look-up saves the rows that a prediction for call `to` needs.
    bool predicts(const Step & step, size_t to) const;
    // Stands for all that is not the same in each run of the graph, but for what the look-ups' launch parameters hold.
    uint64_t key_of_all() const;
    ggml_status queue_all(GraphSegments & segments, const std::function<void()> & after_lookup);
    // Queues a layer's look-up, and behind it predictions for layers to come.
    bool queue_lookup(const Step & step);

    ProxyBackend & backend_;
    ggml_cgraph * graph_;
    LookupPlan & plan_;
    Tiers & tiers_;
    DeviceLookup & lookup_;
    GraphSegments segments_;
    PrefetchRun * prefetch_run_ = nullptr;
    std::vector<bool> is_fully_resident_;
    std::vector<Step> steps_;
    std::vector<int> queued_;
};

} // namespace expertier
