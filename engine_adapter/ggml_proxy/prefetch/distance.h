// How many layers ahead of its own a layer's experts are predicted, by what comes of it.
//
// The farther, the more copies are there in time, and the less is predicted right; what weighs more depends on the
// link, on the device and on the model. So another distance is tried now and then, and kept where more of what was
// begun came in time.
#pragma once

#include <atomic>

namespace expertier {

class PrefetchDistance {
  public:
    static constexpr int most = 4;

    PrefetchDistance(int layers, bool may_change) : layers_(layers), may_change_(may_change) {}

    int layers() const { return layers_; }
    // One that was begun has ended.
    void note(bool is_used, bool in_time);
    // To be called between graphs: only there the distance changes.
    void update();

  private:
    std::atomic<int> layers_;
    bool may_change_;
    int n_ = 0, n_used_ = 0, n_in_time_ = 0; // since the last look
    int share_ = 0;                          // of 1000: in time, at the distance that is tried against
    int tried_from_ = 0;                     // that distance; 0: none is tried
    int failed_ = 0;                         // which way the last trial went, where it was not better
    bool skips_ = false;                     // the first ones after a change were begun before it
    int wait_ = 0, next_wait_ = 1;           // looks until another trial
};

} // namespace expertier
