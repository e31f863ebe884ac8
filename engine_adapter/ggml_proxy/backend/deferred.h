// A list of objects that queued work still uses. They are kept until that work is done.
#pragma once

#include <mutex>
#include <utility>
#include <vector>

namespace expertier {

// Thread-safe: the thread that runs a backend's graphs adds to the backend's list and empties it, while a thread that
// is about to move the slots of the device (drain_backends) empties the lists of all the device's backends.
template <class Held> class Deferred {
  public:
    // Reserves memory for one more object, so that the next add() does not fail.
    void reserve() {
        std::lock_guard<std::mutex> guard(mutex_);
        held_.reserve(held_.size() + 1);
    }
    // Throws std::bad_alloc where there is no memory; `held` is then as it was.
    void add(Held && held) {
        std::lock_guard<std::mutex> guard(mutex_);
        held_.push_back(std::move(held));
    }
    // Empties the list and returns its objects. The caller destroys them once the queued work is done. To destroy them
    // takes the locks of layers, so that must not happen while this list's lock is held.
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
