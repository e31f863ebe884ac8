// Switches, counters, faults, and calls that fail on purpose: what a test sets and reads through control.cpp.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

namespace fake_gpu {

// name, default
// clang-format off
#define FAKE_GPU_SWITCHES(X)                                                                                           \
    X(jitter_us, 0)        /* each piece of queued work waits a random time up to this first */                        \
    X(seed, 1)             /* of that time */                                                                          \
    X(held, 0)             /* streams take no work while this is set */                                                \
    X(pageable_at_call, 0) /* copies from and to memory that is not pinned are over when the call returns, as CUDA's;  \
                              0: they are as late as all others, which ggml's contract allows */                       \
    X(races, 1)            /* work that nobody ordered is looked for, and is a fault */                                \
    X(no_sums, 0)          /* no sums over several devices of their own: an engine adds by copies */                  \
    X(poison, 1)           /* fresh device memory reads as NaN and not as zeros */                                     \
    X(one_at_a_time, 0)    /* calls that free, and that make or end a stream, wait for the device and let no other in */ \
    X(reused_graphs, 1)      /* a graph with the number (uid) of the time before is run as it was then, as CUDA's are */ \
    X(foreign_types, 0)    /* graphs may hold tensors in buffers that claim another type than the device's, as they    \
                              may on CUDA as long as it is built without assertions */
// clang-format on

// Held around a call of the driver, where these come one at a time.
std::unique_lock<std::recursive_mutex> driver_call();

// Of each device. What begins with live_ is what has not been given back yet.
// clang-format off
#define FAKE_GPU_COUNTERS(X)                                                                                           \
    X(graphs) X(nodes) X(synchronizes) X(event_records) X(event_waits)                                                 \
    X(async_sets) X(async_gets) X(async_copies) X(sets) X(gets) X(copies)                                              \
    X(allreduces) X(bytes_to_device) X(pageable_bytes_to_device) X(bytes_to_host) X(bytes_within)                                    \
    X(allocations) X(live_buffers) X(live_bytes) X(live_pinned_buffers) X(live_pinned_bytes) X(live_streams)           \
    X(live_events) X(live_graphs) X(captures) X(graph_launches) X(faults)
// clang-format on

struct Switches {
#define DECLARE(name, value) std::atomic<int64_t> name{ value };
    FAKE_GPU_SWITCHES(DECLARE)
#undef DECLARE
};
extern Switches switches;

struct Counters {
#define DECLARE(name) std::atomic<int64_t> name{ 0 };
    FAKE_GPU_COUNTERS(DECLARE)
#undef DECLARE
};

constexpr int max_devices = 8;
extern Counters counters[max_devices]; // pinned memory is the first one's

// A use of the device that real hardware would answer with an illegal access, or its backend with an abort. The work
// is not done; tests look at the counter.
void fault(int device, const std::string & what);
std::string take_faults();

// Calls that can be made to fail.
enum class Call { memory, pinned, stream, event, capture, instantiate, count };
void fail_call(Call call, int64_t nth); // the nth from now on, once; none when it is 0
bool must_fail(Call call);
bool is_armed(Call call); // it has not been called so often yet

} // namespace fake_gpu
