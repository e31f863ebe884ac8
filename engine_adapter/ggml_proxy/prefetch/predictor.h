// Predictions of a layer's experts by its own router, from the hidden state of the layer before it.
//
//     look-up's stream   look-up of l ─ record ─ predict for l + 1 (hip/kernels/predict.cu) ─ ... ─ look-up of l + 1
//     engine's stream                  └ wait ─ experts of l ─ attention and router of l + 1 ─ ...
//
// The kernel takes the candidates that it replaces out of the device's table, before the look-up of layer l + 1 reads
// it: so nothing that was queued will read their slots, and they may be filled at once.
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

// Whether prefetches pay: the share of the last ones that were of use. While it is low they pause, each time for
// longer.
class Payoff {
  public:
    explicit Payoff(bool may_pause) : may_pause_(may_pause) {}
    // Asked once for each graph.
    bool is_on();
    // False when it has just been found not to pay.
    bool note(bool was_useful);

  private:
    static constexpr int one = 1 << 16;
    bool may_pause_;
    int share_ = one;
    int n_ = 0, pause_ = 0, next_pause_ = 0;
};

class Predictor {
  public:
    static constexpr int64_t max_tokens = 8;
    static constexpr int most_chosen = 4;
    static constexpr int n_candidates = 8;

    // Throws std::runtime_error where memory is missing, or where the kernel does not do in a trial what it should.
    Predictor(DeviceLookup & lookup, ggml_backend_dev_t device, const std::vector<int> & n_experts);

    // Whether the experts of a layer whose router is `to` can be predicted where the router `from` is.
    static bool can(const Router & from, const Router & to, int64_t n_used, int64_t n_tokens);
    // Has room for states of so many floats; to be called while nothing is queued. False when there is no memory.
    bool reserve(size_t n_floats);
    // The rows that the look-up of the layer before has to save for a prediction.
    SavedRows rows_to_save(const Router & from, const Router & to) const;

    // Launch parameters of the graph that has begun: experts of `layer` that are in no slot may take the places of
    // `candidates`, so many and in this order (-1: of a FREE slot).
    void expect(int layer, const std::array<int32_t, n_candidates> & candidates, int n);
    // Queues a prediction behind the look-up that was queued last, which has saved the rows. An expert's bytes decide
    // how many are chosen. False when the driver refused.
    bool queue(int layer, const Router & from, const Router & to, int64_t n_used, int64_t expert_bytes);

    // What came of the layer's prediction in this graph.
    bool has_arrived(int layer) const;
    int n_chosen(int layer) const;
    int32_t chosen(int layer, int i) const;     // an expert to be fetched
    int candidate(int layer, int i) const;      // the index of whom it replaces
    const int32_t * predicted(int layer) const; // tokens times experts of each; -1 where the scores are no numbers

    // How many layers before its own a layer's experts are predicted.
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
