// What queued work still uses: kept until the work is done.
#pragma once

#include <mutex>
#include <utility>
#include <vector>

namespace expertier {

// Thread-safe: the thread that runs a backend's graphs adds to the backend's list and empties it, while a thread that is
// about to move the slots of the device (drain_backends) empties the lists of all the device's backends.
template <class Held> class Deferred {
  public:
    // Takes the memory for one more, so that the next add() does not fail.
    void reserve() {
        std::lock_guard<std::mutex> guard(mutex_);
        held_.reserve(held_.size() + 1);
    }
    // Throws std::bad_alloc where there is no memory; `held` is then as it was.
    void add(Held && held) {
        std::lock_guard<std::mutex> guard(mutex_);
        held_.push_back(std::move(held));
    }
    // Returns all that was kept. The caller drops it once the queued work is done; that takes the locks of layers, so
    // it is not done with the lock of this list held.
    std::vector<Held> take() {
        std::vector<Held> taken;
        std::lock_guard<std::mutex> guard(mutex_);
        taken.swap(held_);
        return taken;
    }

  private:
    std::mutex mutex_; // guards `held_`
    std::vector<Held> held_;
};

} // namespace expertier
