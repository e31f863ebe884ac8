// The driver calls that the device look-up of decode graphs makes (engine_adapter/ggml_proxy/lookup/device_lookup.h), and its kernels, compiled for
// this machine: events are ggml's own, as on CUDA and HIP, and streams are ours.

#include "ggml_device/backend.h"
#include "driver/graphs.h"
#include "driver/memory.h"

#include <sched.h>

static unsigned one_look() {
    sched_yield();
    return 1;
}

#define ONE_LOOK one_look()
#define EXPERTIER_FAKE_BARRIERS
#include <cpu_device.h>
#include <device_lookup.cu>
#include <moves.cu>
#include <predict.cu>
EXPERTIER_FAKE_KERNEL(device_lookup)
EXPERTIER_FAKE_KERNEL(move_rows_by_value)
EXPERTIER_FAKE_KERNEL(predict)

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake_gpu {

namespace {

// The kernel's arguments.
struct Arguments {
    uint64_t ids, column_bytes, row_bytes;
    uint32_t n_used, n_rows;
    uint64_t table;
    uint32_t n_experts;
    uint64_t slots, mailbox, launch_params;
    uint32_t spin_limit;
    uint64_t hidden, hidden_row_bytes;
    uint32_t n_hidden, n_tokens;
    uint64_t saved, gave_up;
    size_t saved_bytes() const { return (size_t) n_tokens * n_hidden * sizeof(float); }
};

Arguments read(void ** values) {
    const auto u64 = [&](int i) { return *static_cast<uint64_t *>(values[i]); };
    const auto u32 = [&](int i) { return *static_cast<uint32_t *>(values[i]); };
    return { u64(0), u64(1),  u64(2),  u32(3),  u32(4),  u64(5),  u32(6),  u64(7), u64(8),
             u64(9), u32(10), u64(11), u64(12), u32(13), u32(14), u64(15), u64(16) };
}

constexpr size_t launch_param_bytes = (CANDIDATES + MOST_CANDIDATES) * sizeof(uint32_t);

// The predicting kernel's.
struct Prediction {
    uint64_t hidden;
    uint32_t n_hidden, n_tokens;
    uint64_t router, router_row_bytes;
    uint32_t router_type;
    uint64_t norm;
    float epsilon;
    uint64_t bias;
    uint32_t is_sigmoid;
    uint64_t late_bias;
    uint32_t n_used, n_spared;
    uint64_t ticket, launch_params;
    uint32_t most;
    uint64_t scores, n_done, table, mailbox;
};

Prediction read_prediction(void ** values) {
    const auto u64 = [&](int i) { return *static_cast<uint64_t *>(values[i]); };
    const auto u32 = [&](int i) { return *static_cast<uint32_t *>(values[i]); };
    return { u64(0),  u32(1),  u32(2),  u64(3),  u64(4),  u32(5),  u64(6),  *static_cast<float *>(values[7]),
             u64(8),  u32(9),  u64(10), u32(11), u32(12), u64(13), u64(14), u32(15),
             u64(16), u64(17), u64(18), u64(19) };
}

// Puts the address of the bytes in place of the device's; false when it is none of the device's.
bool find_bytes(int device, uint64_t & address, size_t size) {
    char * bytes = bytes_at(device, reinterpret_cast<void *>(address), size);
    address = reinterpret_cast<uint64_t>(bytes);
    return bytes != nullptr;
}

void run(Stream & stream, Arguments a, unsigned n_threads) {
    for (uint32_t row = 0; row < a.n_rows; row++) {
        const uint64_t id = a.ids + row / a.n_used * a.row_bytes + row % a.n_used * a.column_bytes;
        touch(stream.device, reinterpret_cast<char *>(id), sizeof(int32_t), false, "a look-up's ids");
    }
    // The table is no race: the host may change it while the kernel waits for the host's answer, and only then.
    touch(stream.device, reinterpret_cast<char *>(a.slots), a.n_rows * sizeof(int32_t), true, "a look-up's slots");
    for (uint32_t token = 0; token < a.n_tokens; token++) {
        touch(stream.device, reinterpret_cast<char *>(a.hidden + token * a.hidden_row_bytes),
              a.n_hidden * sizeof(float), false, "a look-up's hidden state");
    }
    touch(stream.device, reinterpret_cast<char *>(a.saved), a.saved_bytes(), true, "a look-up's saved rows");
    touch(stream.device, reinterpret_cast<char *>(a.launch_params), sizeof(uint32_t), false, "a graph's number");
    if (a.spin_limit > 1000) {      // not a test's own choice
        a.spin_limit = 200'000'000; // minutes on a machine that has nothing else to do, hours on one that has
    }
    void * values[] = { &a.ids,
                        &a.column_bytes,
                        &a.row_bytes,
                        &a.n_used,
                        &a.n_rows,
                        &a.table,
                        &a.n_experts,
                        &a.slots,
                        &a.mailbox,
                        &a.launch_params,
                        &a.spin_limit,
                        &a.hidden,
                        &a.hidden_row_bytes,
                        &a.n_hidden,
                        &a.n_tokens,
                        &a.saved,
                        &a.gave_up };
    const unsigned grid[] = { 1, 1, 1 };
    const unsigned block[] = { n_threads, 1, 1 };
    stream.tell_host(); // that it has arrived
    expertier_fake_kernel_device_lookup.run(expertier_fake_kernel_device_lookup.pack(values), grid, block, 32);
    if (reinterpret_cast<const uint32_t *>(a.mailbox)[MISSING] & 0xffff) {
        stream.acquire_host(); // has filled slots since this was queued
    }
    // An entry that is found in the table was written behind the bytes that it leads to.
    stream.acquire(published(reinterpret_cast<char *>(a.table), a.n_experts * sizeof(int32_t)));
}

void run_prediction(Stream & stream, Prediction p, unsigned n_experts, unsigned n_threads) {
    const auto reads = [&](uint64_t at, size_t size, const char * what) {
        if (at) {
            touch(stream.device, reinterpret_cast<char *>(at), size, false, what);
        }
    };
    reads(p.hidden, (size_t) p.n_tokens * p.n_hidden * sizeof(float), "a prediction's rows");
    for (unsigned expert = 0; expert < n_experts; expert++) {
        reads(p.router + expert * p.router_row_bytes, size_t{ p.n_hidden } * (p.router_type == TYPE_F32 ? 4 : 2),
              "a router");
    }
    reads(p.norm, p.n_hidden * sizeof(float), "a norm");
    reads(p.bias, n_experts * sizeof(float), "a router's bias");
    reads(p.late_bias, n_experts * sizeof(float), "a router's late bias");
    reads(p.ticket, sizeof(uint32_t), "a graph's number");
    reads(p.launch_params, launch_param_bytes, "a layer's launch parameters");
    stream.tell_host();
    void * values[] = { &p.hidden,      &p.n_hidden, &p.n_tokens, &p.router, &p.router_row_bytes,
                        &p.router_type, &p.norm,     &p.epsilon,  &p.bias,   &p.is_sigmoid,
                        &p.late_bias,   &p.n_used,   &p.n_spared, &p.ticket, &p.launch_params,
                        &p.most,        &p.scores,   &p.n_done,   &p.table,  &p.mailbox };
    const unsigned grid[] = { n_experts, 1, 1 };
    const unsigned block[] = { n_threads, 1, 1 };
    expertier_fake_kernel_predict.run(expertier_fake_kernel_predict.pack(values), grid, block, 32);
}

bool launch_device_lookup(Stream & stream, unsigned n_threads, void ** values) {
    Arguments a = read(values);
    const size_t span = (a.n_rows - 1) / a.n_used * a.row_bytes + (a.n_used - 1) * a.column_bytes + sizeof(int32_t);
    const size_t rows = a.n_tokens ? (a.n_tokens - 1) * a.hidden_row_bytes + a.n_hidden * sizeof(float) : 0;
    if (!find_bytes(stream.device, a.ids, span) || !find_bytes(stream.device, a.table, a.n_experts * sizeof(int32_t)) ||
        !find_bytes(stream.device, a.slots, a.n_rows * sizeof(int32_t)) ||
        !find_bytes(stream.device, a.gave_up, sizeof(uint32_t)) ||
        !find_bytes(stream.device, a.launch_params, sizeof(uint32_t)) ||
        !is_pinned(reinterpret_cast<void *>(a.mailbox), (ROWS + a.n_rows) * sizeof(uint32_t)) ||
        (rows &&
         (!find_bytes(stream.device, a.hidden, rows) || !find_bytes(stream.device, a.saved, a.saved_bytes())))) {
        return false;
    }
    share(reinterpret_cast<char *>(a.table), a.n_experts * sizeof(int32_t));
    stream.push([&stream, a, n_threads] { run(stream, a, n_threads); });
    return true;
}

bool launch_prediction(Stream & stream, unsigned n_experts, unsigned n_threads, void ** values) {
    Prediction p = read_prediction(values);
    const size_t row = size_t{ p.n_hidden } * (p.router_type == TYPE_F32 ? 4 : 2);
    const auto found = [&](uint64_t & at, size_t size) { return at == 0 || find_bytes(stream.device, at, size); };
    if (!p.hidden || !p.router || !p.scores || !p.n_done || !p.table ||
        !found(p.hidden, (size_t) p.n_tokens * p.n_hidden * sizeof(float)) ||
        !found(p.router, (n_experts - 1) * p.router_row_bytes + row) || !found(p.norm, p.n_hidden * sizeof(float)) ||
        !found(p.bias, n_experts * sizeof(float)) || !found(p.late_bias, n_experts * sizeof(float)) ||
        !found(p.scores, (size_t) p.n_tokens * n_experts * sizeof(float)) || !found(p.n_done, sizeof(uint32_t)) ||
        !found(p.table, n_experts * sizeof(int32_t)) || !p.ticket || !p.launch_params ||
        !found(p.ticket, sizeof(uint32_t)) || !found(p.launch_params, launch_param_bytes) ||
        !is_pinned(reinterpret_cast<void *>(p.mailbox), (PREDICTED + p.n_tokens * p.n_used) * sizeof(uint32_t)) ||
        n_experts > MOST_EXPERTS || p.n_tokens * n_experts > MOST_SCORES || p.n_tokens * p.n_used > MOST_ROWS ||
        n_threads > MOST_THREADS || (n_threads & (n_threads - 1))) {
        return false;
    }
    stream.push([&stream, p, n_experts, n_threads] { run_prediction(stream, p, n_experts, n_threads); });
    return true;
}

bool launch_copies(Stream & stream, unsigned n_chunks, unsigned n_rows, unsigned n_threads, void ** values) {
    Rows rows = *static_cast<Rows *>(values[0]);
    uint32_t n = *static_cast<uint32_t *>(values[1]);
    uint32_t chunk = *static_cast<uint32_t *>(values[2]);
    if (n > ROWS_BY_VALUE || n != n_rows) {
        return false;
    }
    static_assert(ROWS_BY_VALUE <= 64);
    uint64_t from_host = 0; // a bit for each row
    for (uint32_t i = 0; i < n; i++) {
        uint64_t target = rows.row[i].target, source = rows.row[i].source;
        const bool is_of_host = is_pinned(reinterpret_cast<void *>(source), rows.row[i].bytes);
        if (!find_bytes(stream.device, target, rows.row[i].bytes) ||
            !(is_of_host || find_bytes(stream.device, source, rows.row[i].bytes)) ||
            rows.row[i].bytes > (uint64_t) n_chunks * chunk) {
            return false;
        }
        from_host |= (uint64_t) is_of_host << i;
        rows.row[i].target = target;
        rows.row[i].source = source;
    }
    stream.push([&stream, rows, n, chunk, n_chunks, n_threads, from_host]() mutable {
        for (uint32_t i = 0; i < n; i++) {
            if (!(from_host >> i & 1)) {
                touch(stream.device, reinterpret_cast<char *>(rows.row[i].source), rows.row[i].bytes, false,
                      "what is backed up");
            }
            touch(stream.device, reinterpret_cast<char *>(rows.row[i].target), rows.row[i].bytes, true, "a backup");
        }
        void * arguments[] = { &rows, &n, &chunk };
        const unsigned grid[] = { n_chunks, n, 1 };
        const unsigned block[] = { n_threads, 1, 1 };
        expertier_fake_kernel_move_rows_by_value.run(expertier_fake_kernel_move_rows_by_value.pack(arguments), grid,
                                                     block, 32);
    });
    return true;
}

int32_t launch(void * function, uint32_t n_blocks, uint32_t n_rows, uint32_t, uint32_t n_threads, uint32_t, uint32_t,
               uint32_t, void * at, void ** values, void **) {
    Stream & stream = *static_cast<Stream *>(at);
    if (const int32_t code = stream.capture_state()) {
        return code;
    }
    const bool done = function == &expertier_fake_kernel_device_lookup ? launch_device_lookup(stream, n_threads, values)
                      : function == &expertier_fake_kernel_predict
                          ? launch_prediction(stream, n_blocks, n_threads, values)
                          : launch_copies(stream, n_blocks, n_rows, n_threads, values);
    if (!done) {
        fault(stream.device,
              "a look-up, a prediction or copies have addresses outside of the device's memory, a mailbox that is "
              "not pinned, or too much to do");
    }
    return !done;
}

int32_t event_query(void * at) {
    const Event & event = **static_cast<EventPointer *>(at);
    return event.is_captured() ? (int32_t) CAPTURED_EVENT : !event.is_done();
}

int32_t stream_wait(void * stream, void * event, uint32_t) {
    return static_cast<Stream *>(stream)->wait(*static_cast<EventPointer *>(event));
}

int32_t event_record(void * event, void * stream) {
    return static_cast<Stream *>(stream)->record(*static_cast<EventPointer *>(event));
}

} // namespace

} // namespace fake_gpu

// As expertier_device_lookup of ggml_proxy/abi/abi.h, with a new stream of the device: all but the numbers.
EXPORT void fake_gpu_open_device_lookup(int32_t device, void ** out) {
    using namespace fake_gpu;
    out[0] = reinterpret_cast<void *>(launch);
    out[1] = reinterpret_cast<void *>(stream_wait);
    out[2] = reinterpret_cast<void *>(event_record);
    out[3] = &expertier_fake_kernel_device_lookup;
    out[4] = new Stream(device);
    out[6] = &expertier_fake_kernel_predict; // after the spin_limit
    out[7] = reinterpret_cast<void *>(event_query);
    out[9] = &expertier_fake_kernel_move_rows_by_value; // after the look-ahead's numbers
    get_graph_calls(out + 10);
}

EXPORT void fake_gpu_close_device_lookup(void * stream) { delete static_cast<fake_gpu::Stream *>(stream); }
