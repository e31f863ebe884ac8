// Predictions of a layer's experts by its own router, from the hidden state of the layer before it.
//
//     look-up's stream   look-up of l ─ record ─ predict for l + 1 (hip/kernels/predict.cu) ─ ... ─ look-up of l + 1
//     engine's stream                  └ wait ─ experts of l ─ attention and router of l + 1 ─ ...
//
// The kernel takes the experts that it chooses to replace out of the device's table before the look-up of layer l + 1
// reads it. So no work that is queued will read their slots, and the slots may be filled at once.
#pragma once

#include "abi/abi.h"
#include "backend/device_memory.h"
#include "lookup/device_lookup.h"
#include "ggml-backend.h"
#include "prefetch/rare_miss_layers.h"
#include "prefetch/distance.h"
#include "prefetch/router.h"

#include <array>
#include <cstdint>
#include <vector>

namespace expertier {

// Whether prefetches pay: the share of the last prefetches that were of use. While the share is low, prefetches pause,
// each time for longer.
class Payoff {
  public:
    explicit Payoff(bool may_pause) : may_pause_(may_pause) {}
    // Whether the graph that begins may prefetch; to be called once a graph, as a pause is counted in graphs.
    bool is_on();
    // A prefetch has ended. False when this one begins a pause.
    bool note(bool was_useful);

  private:
    static constexpr int one = 1 << 16;
    bool may_pause_;
    int share_ = one;                // of `one`: prefetches that were of use, weighted towards the last ones
    int n_ = 0;                      // prefetches since the last pause began
    int pause_ = 0, next_pause_ = 0; // graphs
};

class Predictor {
  public:
    static constexpr int64_t max_tokens = 8;
    static constexpr int most_chosen = 4;
    static constexpr int n_candidates = 8;

    // Throws std::runtime_error where memory is missing, and where the kernel fails a trial.
    Predictor(DeviceLookup & lookup, ggml_backend_dev_t device, const std::vector<int> & n_experts);

    // Whether the experts of a layer whose router is `to` can be predicted where the router `from` is.
    static bool can(const Router & from, const Router & to, int64_t n_used, int64_t n_tokens);
    // Makes room for hidden states of `n_floats`; to be called while nothing is queued. False when there is no memory.
    bool reserve(size_t n_floats);
    // The rows that the look-up of the earlier layer has to save for a prediction.
    SavedRows rows_to_save(const Router & from, const Router & to) const;

    // Sets launch parameters of the graph that has begun: predicted experts of `layer` that are in no slot may replace
    // the first `n` of `candidates`, in this order (-1: a FREE slot).
    void expect(int layer, const std::array<int32_t, n_candidates> & candidates, int n);
    // Queues a prediction behind the look-up that was queued last, which has saved the rows. The larger an expert, the
    // fewer are chosen. False when the driver refused.
    bool queue(int layer, const Router & from, const Router & to, int64_t n_used, int64_t expert_bytes);

    // What the layer's prediction in this graph has written to its mailbox.
    bool has_arrived(int layer) const;
    int n_chosen(int layer) const;
    int32_t chosen(int layer, int i) const;     // an expert to be fetched
    int candidate(int layer, int i) const;      // the index of the candidate that it replaces
    const int32_t * predicted(int layer) const; // [n_tokens * n_used] experts; -1 where a score is no number

    int layers_ahead() const { return distance.layers(); }

    Payoff payoff;
    PrefetchDistance distance;
    RareMissLayers rare_miss_layers;

  private:
    uint32_t * mailbox(int layer) const;
    bool launch(int layer, const Router & to, const float * norm, uint32_t n_hidden, uint32_t n_tokens, uint32_t n_used,
                uint32_t n_experts, uint32_t most);
    void try_out(ggml_backend_dev_t device, int n_experts);

    DeviceLookup & lookup_;
    ggml_backend_dev_t device_;
    size_t n_saved_ = 0;
    Buffer saved_, scores_, mailboxes_;
};

} // namespace expertier
