// The driver calls that the gate of decode graphs makes (engine_adapter/ggml_proxy/gate.h), and its kernel, compiled for
// this machine: events are ggml's own, as on CUDA and HIP, and streams are ours.

#include "backend.h"
#include "memory.h"

#define EXPERTIER_FAKE_BARRIERS
#include <cpu_device.h>
#include <gate.cu>
EXPERTIER_FAKE_KERNEL(gate)

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake_gpu {

namespace {

// The kernel's arguments.
struct Arguments {
    uint64_t ids, column_bytes, row_bytes;
    uint32_t n_used, n_rows;
    uint64_t table;
    uint32_t n_experts;
    uint64_t slots, door;
    uint32_t ticket, patience;
};

Arguments read(void ** values) {
    const auto u64 = [&](int i) { return *static_cast<uint64_t *>(values[i]); };
    const auto u32 = [&](int i) { return *static_cast<uint32_t *>(values[i]); };
    return { u64(0), u64(1), u64(2), u32(3), u32(4), u64(5), u32(6), u64(7), u64(8), u32(9), u32(10) };
}

// Puts the address of the bytes in place of the device's; false when it is none of the device's.
bool find_bytes(int device, uint64_t & address, size_t size) {
    char * bytes = bytes_at(device, reinterpret_cast<void *>(address), size);
    address      = reinterpret_cast<uint64_t>(bytes);
    return bytes != nullptr;
}

void run(Stream & stream, Arguments a, unsigned n_threads) {
    for (uint32_t row = 0; row < a.n_rows; row++) {
        const uint64_t id = a.ids + row / a.n_used * a.row_bytes + row % a.n_used * a.column_bytes;
        touch(stream.device, reinterpret_cast<char *>(id), sizeof(int32_t), false, "a gate's ids");
    }
    // The table is no race: the host may change it while the kernel waits for the host's answer, and only then.
    touch(stream.device, reinterpret_cast<char *>(a.slots), a.n_rows * sizeof(int32_t), true, "a gate's slots");
    if (a.patience > 1000) { // not a test's own choice
        a.patience = UINT32_MAX; // a look at the door takes a nanosecond here
    }
    void *         values[] = { &a.ids,       &a.column_bytes, &a.row_bytes, &a.n_used, &a.n_rows,  &a.table,
                                &a.n_experts, &a.slots,        &a.door,      &a.ticket, &a.patience };
    const unsigned grid[]   = { 1, 1, 1 };
    const unsigned block[]  = { n_threads, 1, 1 };
    stream.tell_host(); // that it has arrived
    expertier_fake_kernel_gate.run(expertier_fake_kernel_gate.pack(values), grid, block, 32);
    if (reinterpret_cast<const uint32_t *>(a.door)[MISSING]) {
        stream.acquire_host(); // has filled slots since this was queued
    }
}

int32_t launch(void *, uint32_t, uint32_t, uint32_t, uint32_t n_threads, uint32_t, uint32_t, uint32_t, void * at,
               void ** values, void **) {
    Stream &     stream = *static_cast<Stream *>(at);
    Arguments    a      = read(values);
    const size_t span   = (a.n_rows - 1) / a.n_used * a.row_bytes + (a.n_used - 1) * a.column_bytes + sizeof(int32_t);
    if (!find_bytes(stream.device, a.ids, span) || !find_bytes(stream.device, a.table, a.n_experts * sizeof(int32_t)) ||
        !find_bytes(stream.device, a.slots, a.n_rows * sizeof(int32_t)) ||
        !is_pinned(reinterpret_cast<void *>(a.door), (ROWS + a.n_rows) * sizeof(uint32_t))) {
        fault(stream.device, "a gate has addresses outside of the device's memory, or a door that is not pinned");
        return 1;
    }
    stream.push([&stream, a, n_threads] { run(stream, a, n_threads); });
    return 0;
}

int32_t stream_wait(void * stream, void * event, uint32_t) {
    static_cast<Stream *>(stream)->wait(*static_cast<EventPointer *>(event));
    return 0;
}

int32_t event_record(void * event, void * stream) {
    static_cast<Stream *>(stream)->record(*static_cast<EventPointer *>(event));
    return 0;
}

} // namespace

} // namespace fake_gpu

// As expertier_gate of ggml_proxy/abi.h, with a new stream of the device: launch, stream_wait, event_record, function,
// stream.
EXPORT void fake_gpu_open_gate(int32_t device, void ** out) {
    using namespace fake_gpu;
    out[0] = reinterpret_cast<void *>(launch);
    out[1] = reinterpret_cast<void *>(stream_wait);
    out[2] = reinterpret_cast<void *>(event_record);
    out[3] = &expertier_fake_kernel_gate;
    out[4] = new Stream(device);
}

EXPORT void fake_gpu_close_gate(void * stream) { delete static_cast<fake_gpu::Stream *>(stream); }
