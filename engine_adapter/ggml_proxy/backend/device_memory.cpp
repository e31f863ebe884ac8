#include "backend/device_memory.h"

#include "abi/abi.h"
#include "backend/device.h"
#include "ggml-backend-impl.h"
#include "slab/queued_moves.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <sys/mman.h>

namespace expertier {

namespace {

// No real memory begins below this address: a buffer that seems to begin there counts its addresses from a small
// number.
constexpr uintptr_t least_address = 1u << 16;

// A range of addresses, without memory, by which Python knows a buffer whose own addresses are not unique.
struct StandIn {
    void * base;
    size_t size;

    explicit StandIn(size_t n_bytes)
        : base(mmap(nullptr, n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)), size(n_bytes) {
        if (base == MAP_FAILED) {
            throw std::runtime_error("there is no address space left for the device's memory");
        }
    }
    ~StandIn() { munmap(base, size); }
    StandIn(const StandIn &) = delete;
    StandIn & operator=(const StandIn &) = delete;
};

struct Shared {
    ggml_backend_buffer_t buffer;
    std::unique_ptr<StandIn> instead;
    std::shared_ptr<QueuedMoves> moves; // null until something moves within the buffer
};

std::mutex mutex;
std::map<uintptr_t, Shared> shared; // by the address that Python knows

// The buffer that `address` lies in; shared.end() when there is none. With the mutex held.
std::map<uintptr_t, Shared>::iterator find_shared(const void * address) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    auto after = shared.upper_bound(at);
    if (after == shared.begin()) {
        return shared.end();
    }
    --after;
    return at < after->first + ggml_backend_buffer_get_size(after->second.buffer) ? after : shared.end();
}

std::shared_ptr<QueuedMoves> moves_in(std::map<uintptr_t, Shared>::iterator found) {
    if (found == shared.end()) {
        return nullptr;
    }
    auto & [base, memory] = *found;
    if (!memory.moves) {
        memory.moves = std::make_shared<QueuedMoves>(memory.buffer, base);
    }
    return memory.moves;
}

ggml_backend_dev_t inner_device(const char * name) {
    for (ProxyDevice * proxy : proxies()) {
        if (strcmp(ggml_backend_dev_name(proxy->inner), name) == 0) {
            return proxy->inner;
        }
    }
    return nullptr;
}

} // namespace

Buffer new_device_buffer(ggml_backend_dev_t device, size_t size) {
    Buffer buffer(ggml_backend_buft_alloc_buffer(own_buffer_type(device), size));
    if (buffer) {
        ggml_backend_buffer_clear(buffer.get(), 0);
        ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    return buffer;
}

Buffer new_pinned_buffer(ggml_backend_dev_t device, size_t size) {
    ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(device);
    Buffer buffer(type ? ggml_backend_buft_alloc_buffer(type, size) : nullptr);
    if (!buffer || ggml_backend_buffer_get_type(buffer.get()) != type) {
        throw std::runtime_error("there is no pinned host memory for it");
    }
    ggml_backend_buffer_clear(buffer.get(), 0);
    return buffer;
}

ggml_tensor bytes_at(ggml_backend_buffer_t buffer, void * address, size_t n_bytes) {
    ggml_tensor tensor = {};
    tensor.type = GGML_TYPE_I8;
    tensor.buffer = buffer;
    tensor.data = address;
    tensor.ne[0] = (int64_t) n_bytes;
    tensor.ne[1] = tensor.ne[2] = tensor.ne[3] = 1;
    tensor.nb[0] = 1;
    tensor.nb[1] = tensor.nb[2] = tensor.nb[3] = n_bytes;
    return tensor;
}

void queue_copy(ggml_backend_t stream, ggml_backend_buffer_t from, void * source, ggml_backend_buffer_t to,
                void * target, size_t n_bytes) {
    ggml_tensor read = bytes_at(from, source, n_bytes);
    ggml_tensor write = bytes_at(to, target, n_bytes);
    ggml_backend_tensor_copy_async(stream, stream, &read, &write);
}

ggml_tensor bytes_at(const DevicePlace & place, size_t n_bytes) { return bytes_at(place.buffer, place.data, n_bytes); }

DevicePlace find_device_place(const void * address) {
    std::lock_guard<std::mutex> guard(mutex);
    const auto found = find_shared(address);
    if (found == shared.end()) {
        return {};
    }
    const size_t offset = reinterpret_cast<uintptr_t>(address) - found->first;
    return { found->second.buffer, static_cast<char *>(ggml_backend_buffer_get_base(found->second.buffer)) + offset };
}

std::shared_ptr<QueuedMoves> find_moves(const void * address) {
    std::lock_guard<std::mutex> guard(mutex);
    return moves_in(find_shared(address));
}

std::shared_ptr<QueuedMoves> find_moves_of(ggml_backend_buffer_t buffer) {
    std::lock_guard<std::mutex> guard(mutex);
    return moves_in(std::find_if(shared.begin(), shared.end(),
                                 [buffer](const auto & entry) { return entry.second.buffer == buffer; }));
}

void * share_buffer(ggml_backend_buffer_t buffer) {
    void * base = ggml_backend_buffer_get_base(buffer);
    Shared entry{ buffer, nullptr, nullptr };
    if (reinterpret_cast<uintptr_t>(base) < least_address) {
        entry.instead = std::make_unique<StandIn>(ggml_backend_buffer_get_size(buffer));
        base = entry.instead->base;
    }
    std::lock_guard<std::mutex> guard(mutex);
    shared[reinterpret_cast<uintptr_t>(base)] = std::move(entry);
    return base;
}

void unshare_buffer(ggml_backend_buffer_t buffer) {
    std::shared_ptr<QueuedMoves> moves; // declared before the guard, so that it is destroyed without the lock
    std::lock_guard<std::mutex> guard(mutex);
    for (auto entry = shared.begin(); entry != shared.end(); ++entry) {
        if (entry->second.buffer == buffer) {
            moves = std::move(entry->second.moves);
            shared.erase(entry);
            return;
        }
    }
}

} // namespace expertier

using namespace expertier;

// Whether the device computes on the host's own memory: 1 or 0; -1 when no proxy wraps a device of that name.
EXPERTIER_EXPORT int32_t expertier_device_is_host(const char * name) {
    ggml_backend_dev_t device = inner_device(name);
    return device ? ggml_backend_buft_is_host(own_buffer_type(device)) : -1;
}

EXPERTIER_EXPORT int32_t expertier_device_memory(const char * name, int64_t * free, int64_t * total) {
    ggml_backend_dev_t device = inner_device(name);
    if (device == nullptr) {
        return 0;
    }
    size_t n_free = 0, n_total = 0;
    ggml_backend_dev_memory(device, &n_free, &n_total);
    *free = (int64_t) n_free;
    *total = (int64_t) n_total;
    return 1;
}

// Allocates zeroed memory on the device or, with `pinned`, host memory that the device copies from at full speed.
// Returns its address; 0 when the device gave no memory; -1 when `pinned` was asked of a device that has no such host
// memory, for which any host memory does as well.
EXPERTIER_EXPORT int64_t expertier_memory_alloc(const char * name, int32_t pinned, uint64_t size) {
    ggml_backend_dev_t device = inner_device(name);
    if (device == nullptr) {
        return 0;
    }
    try {
        Buffer buffer;
        if (pinned) {
            ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(device);
            if (type == nullptr) {
                return -1;
            }
            buffer.reset(ggml_backend_buft_alloc_buffer(type, size));
            if (buffer && ggml_backend_buffer_get_type(buffer.get()) != type) {
                return 0; // the device silently gave pageable memory instead
            }
            if (buffer) {
                ggml_backend_buffer_clear(buffer.get(), 0);
            }
        } else {
            buffer = new_device_buffer(device, size);
        }
        if (!buffer) {
            return 0;
        }
        void * address = share_buffer(buffer.get());
        buffer.release();
        return reinterpret_cast<int64_t>(address);
    } catch (const std::exception &) {
        return 0;
    }
}

// Returns 0 when no memory of expertier_memory_alloc begins at `address`.
EXPERTIER_EXPORT int32_t expertier_memory_free(uint64_t address) {
    const DevicePlace place = find_device_place(reinterpret_cast<void *>(address));
    if (place.buffer == nullptr || ggml_backend_buffer_get_base(place.buffer) != place.data) {
        return 0;
    }
    unshare_buffer(place.buffer);
    ggml_backend_buffer_free(place.buffer);
    return 1;
}

// Both copies are complete when they return. They return 0 when the device's address lies in no memory of ours.
EXPERTIER_EXPORT int32_t expertier_memory_copy_in(uint64_t target, const void * source, uint64_t n_bytes) {
    const DevicePlace place = find_device_place(reinterpret_cast<void *>(target));
    if (place.buffer == nullptr) {
        return 0;
    }
    ggml_tensor tensor = bytes_at(place, n_bytes);
    ggml_backend_tensor_set(&tensor, source, 0, n_bytes);
    return 1;
}

EXPERTIER_EXPORT int32_t expertier_memory_copy_out(void * target, uint64_t source, uint64_t n_bytes) {
    const DevicePlace place = find_device_place(reinterpret_cast<void *>(source));
    if (place.buffer == nullptr) {
        return 0;
    }
    ggml_tensor tensor = bytes_at(place, n_bytes);
    ggml_backend_tensor_get(&tensor, target, 0, n_bytes);
    return 1;
}

// Calls QueuedMoves::queue for the memory that `slab` lies in, which nothing else may use before
// expertier_memory_finish. Returns 0 when that is no memory of ours, when a row lies outside of it, or when the device
// gave no stream; some rows may have been moved then.
EXPERTIER_EXPORT int32_t expertier_memory_relocate(uint64_t slab, const int64_t * rows, int64_t n,
                                                   const int64_t * zeros, int64_t n_zeros) {
    try {
        const auto moves = find_moves(reinterpret_cast<void *>(slab));
        return moves && moves->queue(rows, n, zeros, n_zeros);
    } catch (const std::exception &) {
        return 0;
    }
}

EXPERTIER_EXPORT int32_t expertier_memory_finish(uint64_t slab) {
    const auto moves = find_moves(reinterpret_cast<void *>(slab));
    if (moves) {
        moves->finish();
    }
    return moves != nullptr;
}

EXPERTIER_EXPORT int32_t expertier_memory_zero(uint64_t target, uint64_t n_bytes) {
    const DevicePlace place = find_device_place(reinterpret_cast<void *>(target));
    if (place.buffer == nullptr) {
        return 0;
    }
    ggml_tensor tensor = bytes_at(place, n_bytes);
    ggml_backend_tensor_memset(&tensor, 0, 0, n_bytes);
    return 1;
}
