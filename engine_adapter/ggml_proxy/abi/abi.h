// The C interface between expertier's Python side and the proxy library: plain structs that both sides own.
// Python mirrors these (and only these) in engine_adapter/abi/structs.py; EXPERTIER_ABI counts their changes.
#pragma once

#include <cstddef>
#include <cstdint>

#define EXPERTIER_ABI 11
#define EXPERTIER_EXPORT extern "C" __attribute__((visibility("default")))

// Results of expertier_policy::begin that are not a number of misses; nothing was changed.
enum expertier_begin_status : int32_t {
    EXPERTIER_BUSY = -1,       // another thread is filling an expert, or too few slots are unpinned now
    EXPERTIER_TOO_MANY = -2,   // more distinct experts than the layer has slots
    EXPERTIER_BAD_EXPERT = -3, // an id outside the layer's experts
    EXPERTIER_BAD_CALL = -4,   // tables of another policy version, or a layer, slot or count out of range
};

// The compiled residency policy; planner/policy/operations.py lists its operations. No call takes the interpreter's
// lock; the caller holds the layer's own lock. `directory` points to the addresses of the residency tables.
struct expertier_policy {
    int32_t (*begin)(const int64_t * directory, int32_t layer, const int32_t * experts, int32_t n, int32_t * slots,
                     int32_t * miss_index);
    int32_t (*complete)(const int64_t * directory, int32_t layer, const int32_t * slots, int32_t n);
    int32_t (*abort)(const int64_t * directory, int32_t layer, const int32_t * slots, int32_t n);
    int32_t (*release)(const int64_t * directory, int32_t layer, const int32_t * slots, int32_t n);
    int32_t (*resident_first)(const int64_t * directory, int32_t layer, int32_t * experts, int32_t n);
    int32_t (*pin_ready)(const int64_t * directory, int32_t layer, const int32_t * experts, int32_t n, int32_t * slots);
    int32_t (*is_fully_resident)(const int64_t * directory, int32_t layer);
    int32_t (*version)(const int64_t * directory, int32_t layer);
    int32_t (*evicted_by)(const int64_t * directory, int32_t layer, const int32_t * slots, int32_t n,
                          int32_t * experts);
    int32_t (*begin_prefetch_into)(const int64_t * directory, int32_t layer, int32_t expert, int32_t slot);
    int32_t (*victims)(const int64_t * directory, int32_t layer, int32_t * slots, int32_t n, int32_t * experts);
};

// Driver calls and kernels for the device look-up (lookup/device_lookup.h). The calls have the signatures of
// cuLaunchKernel, cuStreamWaitEvent, cuEventRecord and cuEventQuery, which HIP's share.
struct expertier_device_lookup {
    int32_t (*launch)(void * function, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x,
                      uint32_t block_y, uint32_t block_z, uint32_t shared_bytes, void * stream, void ** arguments,
                      void ** extra);
    int32_t (*stream_wait)(void * stream, void * event, uint32_t flags);
    int32_t (*event_record)(void * event, void * stream);
    void * function;
    void * stream;
    uint32_t spin_limit; // how often a look-up reads its mailbox before it gives up; 0: for about half a second
    void * predict;      // the kernel that predicts; null: there is none
    int32_t (*event_query)(void * event); // 0: the work that was recorded is done
    int32_t layers_ahead;                 // how many layers ahead experts are predicted (prefetch/run.h); 0: none
    int32_t prefetch_pauses; // 1: prefetching pauses while it does not pay, and finds the distance that pays
    void * copy;             // the kernel that copies many pieces (moves.cu)
    // For captured graphs (lookup/captured.h), with the signatures of cuStreamBeginCapture, cuStreamEndCapture,
    // cuGraphInstantiateWithFlags, cuGraphLaunch, cuGraphExecDestroy and cuGraphDestroy. All null: nothing is captured.
    int32_t (*capture_begin)(void * stream, int32_t mode);
    int32_t (*capture_end)(void * stream, void ** graph);
    int32_t (*graph_instantiate)(void ** executable, void * graph, uint64_t flags);
    int32_t (*graph_launch)(void * executable, void * stream);
    int32_t (*graph_exec_destroy)(void * executable);
    int32_t (*graph_destroy)(void * graph);
    // As cuGraphExecUpdate_v2; `failure` is room for its report. Null: a graph is instantiated each time.
    int32_t (*graph_exec_update)(void * executable, void * graph, void * failure);
};

// Copies the experts' bytes into their slots; called without any lock. Its last act, when every byte is in its slot, is
// to write EXPERTIER_FILLED to `done`. A return value would not do: an interpreter that is interrupted as it enters the
// function returns none.
#define EXPERTIER_FILLED 0x46494c4c
typedef void (*expertier_fill)(void * context, int32_t layer, int32_t n, const int32_t * experts, const int32_t * slots,
                               int32_t * done);

// Copies the experts' bytes to their places in a streamed layer (expertier_copy), which begins at `streamed` in device
// memory. Called without any lock; writes EXPERTIER_FILLED to `done` as a fill does.
typedef void (*expertier_load)(void * context, int32_t layer, int32_t n, const int32_t * experts, uint64_t streamed,
                               int32_t * done);

// Copies `n_bytes` bytes of a layer's matrix from the file to host memory, when the engine reads an expert tensor back.
// `offset` counts from the first expert's first byte; the experts follow one another. Called without any lock; writes
// EXPERTIER_FILLED to `done` as a fill does.
typedef void (*expertier_read)(void * context, int32_t layer, int32_t matrix, uint64_t offset, uint64_t n_bytes,
                               void * out, int32_t * done);

// How misses are served. While a thread sits in the engine with the interpreter's lock, Python cannot answer, and a
// call of `fill` would never return.
enum expertier_fills : int32_t {
    EXPERTIER_FILLS_SERVED = 0,  // by `fill`
    EXPERTIER_FILLS_ZEROS = 1,   // by zeros for the next graph, whose slots are FREE afterwards; later graphs wait
    EXPERTIER_FILLS_REFUSED = 2, // not at all: a batch that misses fails
};

struct expertier_matrix {
    const char * name;        // the tensor's name in the GGUF
    int32_t type;             // ggml_type
    int64_t ne0;              // elements a row
    int64_t ne1;              // rows
    uint64_t expert_bytes;    // of one expert, as the expert table computed them from the type
    uint64_t offset;          // bytes from the slab's base to this matrix of slot 0
    uint64_t stride;          // bytes from one slot's matrix to the next slot's
    uint64_t streamed_offset; // the same two in a streamed layer, which holds all experts in the order of their numbers
    uint64_t streamed_stride;
};

// One piece of an expert: where it lies in a host block, in a slot and in a streamed layer.
struct expertier_copy {
    uint64_t source; // bytes from the host block's beginning
    uint64_t offset; // bytes from the slab's base, in slot 0
    uint64_t stride;
    uint64_t streamed_offset; // bytes from the streamed layer's beginning, of expert 0
    uint64_t streamed_stride;
    uint64_t n_bytes;
};

struct expertier_layer {
    int32_t n_experts;
    int32_t n_slots;
    int32_t n_matrices;
    const expertier_matrix * matrices;
    int32_t n_copies;
    const expertier_copy * copies;
    uint64_t streamed_bytes;
    int64_t first_copy; // index of this layer's expert 0 in the arrays of expertier_host_copies
};

// Which experts the host pool has complete copies of (tiers/host_pool/copy_directory.py). A thread that holds the lock
// may read `address`, add itself to `readers` and take itself out again, set `used` and count `hits`. A copy with
// readers keeps its address.
struct expertier_host_copies {
    void * lock;       // laid out as the lock of one layer (residency/layer_lock.h)
    int64_t * address; // of an expert's copy; 0: the pool has none
    int32_t * readers;
    uint8_t * used;
    int64_t * hits; // one number
};

struct expertier_binding {
    int32_t abi; // EXPERTIER_ABI
    int32_t n_layers;
    const expertier_layer * layers;
    void * slab_base;
    uint64_t slab_bytes;
    const int64_t * directory;
    void * locks; // a mutex and a condition variable for each layer (residency/layer_lock.h)
    expertier_policy policy;
    expertier_fill fill;
    expertier_load load;
    expertier_read read;
    void * fill_context; // the first argument of `fill`, `load` and `read`
    expertier_host_copies host_copies;
    int32_t sees_all;      // 1: every call must be looked up, even where all of a layer's experts are in their slots
    int32_t stream_tokens; // a layer is streamed for batches of at least so many tokens; 0: never
};

// Moves the boundary in the slab between the engine's compute buffers, which begin at the slab's base, and the slots:
// afterwards no slot lies in the slab's first `compute_bytes` bytes. Called while no graph runs on the device and
// nothing is queued there. It rewrites the binding and `compute` in place, whether it succeeds or not, and writes
// EXPERTIER_FILLED to `done` when it succeeded.
typedef void (*expertier_move)(void * context, uint64_t compute_bytes, int32_t * done);

// Writes 1 to `wants` when layers should have other numbers of slots, else 0. After a 1, `move` is called and changes
// the numbers.
typedef void (*expertier_look)(void * context, int32_t * wants);

// The slab's low end, for the engine's compute buffers (compute_region.h).
struct expertier_compute {
    expertier_move move;
    void * context;
    const expertier_binding * binding; // the one that the tiers were bound with
    uint64_t compute_bytes;            // bytes at the slab's low end that are free of slots now
    uint64_t most_bytes;               // the most bytes that can be freed of slots there
    int64_t move_cost_bytes;           // lowering the boundary pays after so many missed bytes, plus the bytes gained
    int64_t cut_cost_bytes;            // what a graph's cuts cost, in missed bytes; a layer that has a slot for every
                                       // expert needs no cut
    expertier_look look;               // null: the layers' numbers of slots stay
    int32_t look_graphs;               // how many graphs run between two calls of `look`
};

struct expertier_compute_counts {
    int64_t moves_up, moves_down, failed_moves;
    int64_t quota_moves;    // moves that gave layers other numbers of slots
    int64_t move_ns;        // time in all moves, from when the device had no work left
    int64_t drain_ns;       // time before that, waiting for the device's queued work
    int64_t queue_ns;       // the part of move_ns in which the device's copies were queued
    int64_t wait_ns;        // the part of move_ns in which the device was waited for
    int64_t copies;         // calls of the device that the moves took
    int64_t boundary_bytes; // bytes at the slab's low end that are free of slots now
    int64_t needed_bytes;   // the part of them that graphs need, up to the highest byte
    int64_t buffers;        // the engine's compute buffers in the region
    int64_t buffer_bytes;   // their size
};
