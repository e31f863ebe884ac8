// Counts the objects of a kind that live, so that a test sees what an interrupt has left behind.
#pragma once

#include <atomic>
#include <cstdint>

namespace expertier {

template <typename Kind> class Counted {
  public:
    Counted() { live_++; }
    ~Counted() { live_--; }
    Counted(const Counted &) = delete;
    Counted & operator=(const Counted &) = delete;

    static int32_t live() { return live_; }

  private:
    static inline std::atomic<int32_t> live_{ 0 };
};

} // namespace expertier
