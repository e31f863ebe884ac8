// What the tests call, through library.py.

#include "ggml_device/device.h"
#include "driver/memory.h"
#include "driver/stream.h"

#include <cstdio>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace fake_gpu;

// Before ggml loads the library.
EXPORT void fake_gpu_configure(int32_t n, int64_t bytes_each) { configure(n, (size_t) bytes_each); }

EXPORT void fake_gpu_set_memory(int32_t device, int64_t bytes) { set_limit(device, (size_t) bytes); }

// 0 when there is no such switch.
EXPORT int32_t fake_gpu_switch(const char * name, int64_t value) {
    bool known = false;
#define SET(one, ...)                                                                                                  \
    if (strcmp(name, #one) == 0) {                                                                                     \
        switches.one = value;                                                                                          \
        known = true;                                                                                                  \
    }
    FAKE_GPU_SWITCHES(SET)
#undef SET
    wake_streams();
    return known;
}

// Every switch as it was, and no call fails.
EXPORT void fake_gpu_reset(void) {
#define RESET(one, value) switches.one = value;
    FAKE_GPU_SWITCHES(RESET)
#undef RESET
    for (int call = 0; call < (int) Call::count; call++) {
        fail_call((Call) call, 0);
    }
    wake_streams();
}

// The names of the counters, one after the other; null after the last.
EXPORT const char * fake_gpu_counter_name(int32_t index) {
    static const char * const names[] = {
#define NAME(one) #one,
        FAKE_GPU_COUNTERS(NAME)
#undef NAME
            nullptr,
    };
    return names[index];
}

// All of them, in that order.
EXPORT void fake_gpu_counters(int32_t device, int64_t * out) {
    const Counters & from = counters[device];
#define READ(one) *out++ = from.one;
    FAKE_GPU_COUNTERS(READ)
#undef READ
}

// 0: device memory, 1: pinned memory, 2: streams, 3: events, 4: the begin of a capture, 5: the instantiation of a graph.
EXPORT void fake_gpu_fail(int32_t call, int64_t nth) { fail_call((Call) call, nth); }

EXPORT int32_t fake_gpu_is_armed(int32_t call) { return is_armed((Call) call); }

EXPORT void fake_gpu_synchronize(void) { Stream::synchronize_all(); }

EXPORT void fake_gpu_take_faults(char * out, size_t size) { snprintf(out, size, "%s", take_faults().c_str()); }
