// Memory of the engine's own devices, handed to Python by address: the slab, the streamed layers, pinned host memory.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <memory>

namespace expertier {

struct FreeBuffer {
    void operator()(ggml_backend_buffer_t buffer) const { ggml_backend_buffer_free(buffer); }
};
using Buffer = std::unique_ptr<ggml_backend_buffer, FreeBuffer>;

struct FreeStream {
    void operator()(ggml_backend_t stream) const { ggml_backend_free(stream); }
};
using Stream = std::unique_ptr<ggml_backend, FreeStream>;

// Zeroed memory in the device's default buffer type; null when the device has no more.
Buffer new_device_buffer(ggml_backend_dev_t device, size_t size);

// Zeroed host memory that the device reads and writes, too; throws std::runtime_error when there is none.
Buffer new_pinned_buffer(ggml_backend_dev_t device, size_t size);

// `n_bytes` at `address` within `buffer`, as a tensor without a context.
ggml_tensor bytes_at(ggml_backend_buffer_t buffer, void * address, size_t n_bytes);

// The buffer and the place in it that an address of Python's stands for: both null where it is in no memory of ours.
struct DevicePlace {
    ggml_backend_buffer_t buffer = nullptr;
    void * data = nullptr; // the address by which the backend knows the place
};
DevicePlace find_device_place(const void * address);

ggml_tensor bytes_at(const DevicePlace & place, size_t n_bytes);

// Queues a copy of `n_bytes` between two places of one device.
void queue_copy(ggml_backend_t stream, ggml_backend_buffer_t from, void * source, ggml_backend_buffer_t to,
                void * target, size_t n_bytes);

class QueuedMoves;

// The queue of moves for the memory of expertier_memory_alloc that `address` lies in, or that `buffer` is; null for any
// other memory.
std::shared_ptr<QueuedMoves> find_moves(const void * address);
std::shared_ptr<QueuedMoves> find_moves_of(ggml_backend_buffer_t buffer);

// Lets Python copy to addresses in `buffer` from now on, and returns the address by which Python knows it. That is the
// buffer's own address, unless the backend gives the same address to all of its buffers (Vulkan's begin at 4096).
void * share_buffer(ggml_backend_buffer_t buffer);
void unshare_buffer(ggml_backend_buffer_t buffer);

} // namespace expertier
