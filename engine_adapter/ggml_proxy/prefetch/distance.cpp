#include "prefetch/distance.h"

#include <algorithm>

namespace expertier {

namespace {

constexpr int window = 512;    // of those that ended, between two looks
constexpr int skipped = 16;    // after a change
constexpr int many_late = 150; // of 1000 that were begun: farther is tried first
// Of 1000, where 20 are chance: farther has to bring so much, and nearer may cost so much, for it is right more often.
constexpr int gain_of_farther = 50, cost_of_nearer = 20;
constexpr int longest_wait = 64;

} // namespace

void PrefetchDistance::note(bool is_used, bool in_time) {
    n_ += 1;
    n_used_ += is_used;
    n_in_time_ += is_used && in_time;
}

void PrefetchDistance::update() {
    if (!may_change_ || n_ < (skips_ ? skipped : window)) {
        return;
    }
    const int share = 1000 * n_in_time_ / n_, late = 1000 * (n_used_ - n_in_time_) / n_;
    const bool was_skipped = skips_;
    n_ = n_used_ = n_in_time_ = 0;
    skips_ = false;
    if (was_skipped) {
        return;
    }
    if (tried_from_ != 0) {
        const int from = tried_from_;
        tried_from_ = 0;
        if (share < share_ + (layers_ > from ? gain_of_farther : -cost_of_nearer)) {
            failed_ = layers_ > from ? 1 : -1;
            layers_ = from;
            skips_ = true;
            wait_ = next_wait_;
            next_wait_ = std::min(2 * next_wait_, longest_wait);
            return;
        }
        next_wait_ = 1;
        failed_ = 0;
    }
    if (wait_ > 0) {
        wait_ -= 1;
        return;
    }
    const int now = layers_;
    int step = late > many_late ? 1 : -1;
    if (step == failed_ || now + step < 1 || now + step > most) {
        step = -step;
    }
    const int next = now + step;
    if (next < 1 || next > most) {
        return;
    }
    share_ = share;
    tried_from_ = now;
    layers_ = next;
    skips_ = true;
}

} // namespace expertier
