// How many layers before its own a layer's experts are predicted, chosen by what comes of the prefetches.
//
// The farther ahead, the more copies arrive in time, and the fewer predictions are right; which weighs more depends on
// the link, on the device and on the model. So another distance is tried now and then, and kept where a larger share of
// the prefetches came in time.
//
//     Holding ─ no window is left to wait ─► TrialBegins ─ a few ended ─► Trial ─ better ─► Holding, next trial at once
//        ▲                                                                  │
//        └──────────── a few ended ──────────── Returns ◄──── not better ───┘
//
// In TrialBegins and Returns the distance has just changed, and the prefetches that end first were begun before that.
#pragma once

#include <atomic>

namespace expertier {

class PrefetchDistance {
  public:
    static constexpr int most = 4;

    PrefetchDistance(int layers, bool may_change) : layers_(layers), may_change_(may_change) {}

    int layers() const { return layers_; }
    // A prefetch has ended at its layer's look-up: whether that used its expert, and whether the copy was complete.
    void note(bool is_used, bool in_time);
    // To be called between graphs: only here does the distance change.
    void update();

  private:
    enum class Phase { Holding, TrialBegins, Trial, Returns };

    void end_trial(int share);
    void begin_trial(int share, int late);

    std::atomic<int> layers_;
    bool may_change_;
    Phase phase_ = Phase::Holding;
    int n_ = 0, n_used_ = 0, n_in_time_ = 0; // prefetches that ended since the last window's end
    int from_ = 0;                           // in a trial: the distance before it
    int share_ = 0;                          // in a trial: of 1000 prefetches, in time at that distance
    int failed_step_ = 0;                    // the step of the last trial, where it was not better
    int wait_ = 0, next_wait_ = 1;           // windows until the next trial
};

} // namespace expertier
