// Queues a decode graph with its device look-ups: captured and launched at once, or segment by segment. The look-ups
// are answered by LookupRun (lookup/run.cpp).
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

// For one run of a graph. The methods are called in this order, and all but the first with all layers' locks held.
class LookupQueue {
  public:
    LookupQueue(ProxyBackend & backend, ggml_cgraph * graph);
    ~LookupQueue();
    LookupQueue(const LookupQueue &) = delete;
    LookupQueue & operator=(const LookupQueue &) = delete;

    static bool can_capture(const LookupPlan & plan);

    // Finds the layers that have a slot for every expert and need no look-up. Takes each layer's lock in turn.
    void look_at_layers();
    bool is_fully_resident(size_t call) const { return is_fully_resident_[call]; }

    // Floats of the largest hidden state that predictions read; 0: nothing can be predicted.
    size_t n_predicted_floats() const;
    // Has experts predicted from here on, and gives the predictions to `ahead`.
    void predict(PrefetchRun & ahead) { prefetch_run_ = &ahead; }

    // Lists the look-ups of this graph; false when there is no memory for the slot ids of one.
    bool find_lookups();
    // Tells the device look-up and the prefetch run what the graph that has begun will ask for.
    void expect();
    // Launches the graph, captured before or now; false when the graph has to be queued instead.
    bool launch_captured();
    // Queues the graph segment by segment; `after_lookup` is called when a look-up has been queued.
    ggml_status queue_all(const std::function<void()> & after_lookup);

    // The layers whose look-ups are queued, in that order.
    const std::vector<int> & layers() const { return queued_; }

  private:
    // A layer call whose experts are looked up.
    struct Step {
        size_t call;
        const ggml_tensor * ids;
        ggml_tensor * slot_ids;
        size_t next = 1, last = 0; // the calls that are predicted behind this look-up, where that is possible
        SavedRows saved;
    };

    // The first and the last call that is to be predicted at call `i`. The first call of a graph predicts all calls up
    // to the prefetch distance.
    std::pair<size_t, size_t> predicted_by(size_t i) const;
    // Whether experts of call `to` can be predicted at call `from`, and the layer has more slots than the call uses.
    bool can_predict(size_t from, size_t to) const;
    // Whether a step's look-up saves the rows that a prediction for call `to` needs.
    bool predicts(const Step & step, size_t to) const;
    // A number for all that the captured graph depends on and the launch parameters do not carry.
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
