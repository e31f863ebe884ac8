// What the proxy counts for one binding (abi/counters.h), incremented from any thread.
#pragma once

#include "abi/counters.h"

#include <atomic>
#include <cstdint>

namespace expertier {

struct Counters {
#define EXPERTIER_ATOMIC(name, meaning) std::atomic<int64_t> name{ 0 };
    EXPERTIER_COUNTERS(EXPERTIER_ATOMIC)
#undef EXPERTIER_ATOMIC
};

} // namespace expertier
