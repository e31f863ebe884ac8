#include "prefetch/distance.h"

#include <algorithm>

namespace expertier {

namespace {

constexpr int window = 512;    // prefetches that end between two looks
constexpr int skipped = 16;    // prefetches that end first after a change of the distance
constexpr int many_late = 150; // of 1000 prefetches: with more that came late, a larger distance is tried first
// Of 1000 prefetches, where 20 are chance: a larger distance has to bring so many more in time, and a smaller one may
// lose so many, for its predictions are right more often.
constexpr int gain_of_farther = 50, cost_of_nearer = 20;
constexpr int longest_wait = 64;

} // namespace

void PrefetchDistance::note(bool is_used, bool in_time) {
    n_ += 1;
    n_used_ += is_used;
    n_in_time_ += is_used && in_time;
}

void PrefetchDistance::update() {
    const bool has_just_changed = phase_ == Phase::TrialBegins || phase_ == Phase::Returns;
    if (!may_change_ || n_ < (has_just_changed ? skipped : window)) {
        return;
    }
    const int share = 1000 * n_in_time_ / n_, late = 1000 * (n_used_ - n_in_time_) / n_;
    n_ = n_used_ = n_in_time_ = 0;
    switch (phase_) {
    case Phase::TrialBegins:
        phase_ = Phase::Trial;
        return;
    case Phase::Returns:
        phase_ = Phase::Holding;
        return;
    case Phase::Trial:
        end_trial(share);
        break;
    case Phase::Holding:
        break;
    }
    if (phase_ != Phase::Holding) {
        return;
    }
    if (wait_ > 0) {
        wait_ -= 1;
        return;
    }
    begin_trial(share, late);
}

void PrefetchDistance::end_trial(int share) {
    const int step = layers_ - from_;
    if (share >= share_ + (step > 0 ? gain_of_farther : -cost_of_nearer)) {
        phase_ = Phase::Holding;
        next_wait_ = 1;
        failed_step_ = 0;
        return;
    }
    phase_ = Phase::Returns;
    layers_ = from_;
    failed_step_ = step;
    wait_ = next_wait_;
    next_wait_ = std::min(2 * next_wait_, longest_wait);
}

void PrefetchDistance::begin_trial(int share, int late) {
    const int now = layers_;
    int step = late > many_late ? 1 : -1;
    if (step == failed_step_ || now + step < 1 || now + step > most) {
        step = -step;
    }
    if (now + step < 1 || now + step > most) {
        return;
    }
    phase_ = Phase::TrialBegins;
    from_ = now;
    share_ = share;
    layers_ = now + step;
}

} // namespace expertier
