// Holds one layer's lock, and waits on its condition. Both are shared with Python: tiers/shared/layer_locks.py lays
// them out in its own memory.
#pragma once

#include <cerrno>
#include <cstdint>
#include <ctime>
#include <pthread.h>

namespace expertier {

class LayerLock {
  public:
    static constexpr size_t stride = 128;          // bytes a layer
    static constexpr size_t condition_offset = 64; // the mutex lies at 0

    LayerLock(void * locks, int layer)
        : mutex_(reinterpret_cast<pthread_mutex_t *>(static_cast<char *>(locks) + layer * stride)),
          condition_(
              reinterpret_cast<pthread_cond_t *>(static_cast<char *>(locks) + layer * stride + condition_offset)) {
        pthread_mutex_lock(mutex_);
    }
    ~LayerLock() { pthread_mutex_unlock(mutex_); }
    LayerLock(const LayerLock &) = delete;
    LayerLock & operator=(const LayerLock &) = delete;

    // Waits for a change of the layer's state; false once `deadline` (CLOCK_MONOTONIC) has passed.
    bool wait_until(const timespec & deadline) {
        return pthread_cond_clockwait(condition_, mutex_, CLOCK_MONOTONIC, &deadline) != ETIMEDOUT;
    }
    void notify_all() { pthread_cond_broadcast(condition_); }

  private:
    static_assert(sizeof(pthread_mutex_t) <= condition_offset, "the mutex must fit before the condition");
    static_assert(sizeof(pthread_cond_t) <= stride - condition_offset, "the condition must fit in the layer's bytes");
    pthread_mutex_t * mutex_;
    pthread_cond_t * condition_;
};

} // namespace expertier
