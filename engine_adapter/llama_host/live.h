// Counts the living objects of a class, so that a test can tell whether an interrupt has left any behind.
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
