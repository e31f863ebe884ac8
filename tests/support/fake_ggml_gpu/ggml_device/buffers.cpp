#include "ggml_device/buffers.h"

#include "driver/memory.h"
#include "driver/races.h"
#include "driver/stream.h"

#include "ggml-impl.h"

#include <cstring>

namespace fake_gpu {

namespace {

constexpr size_t alignment = 128;
constexpr int64_t row_padding = 512; // elements that CUDA's matrix kernels read beyond a row

struct Buffer {
    const Device * device;
    void * base;
};

const Buffer & self(ggml_backend_buffer_t buffer) { return *static_cast<Buffer *>(buffer->context); }
const Device & self(ggml_backend_buffer_type_t type) { return *static_cast<Device *>(type->context); }

// The bytes behind a part of a tensor in `buffer`, which the host is about to touch; null, and a fault, when it lies
// outside of all memory.
char * part_of(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, size_t offset, size_t size, bool writes,
               const char * what) {
    const int device = self(buffer).device->index;
    if (Stream::captures_here(device)) { // CUDA would let it pass, but a replay would not do it again
        fault(device, std::string(what) + " of " + tensor->name + " by the thread that captures a stream");
    }
    char * bytes = bytes_at(device, static_cast<char *>(tensor->data) + offset, size);
    if (bytes == nullptr) {
        fault(device, std::string(what) + " of " + tensor->name + " outside of its memory");
    } else {
        touch(device, bytes, size, writes, std::string(what) + " of " + tensor->name);
    }
    return bytes;
}

void free_buffer(ggml_backend_buffer_t buffer) {
    const auto call = driver_call();
    Stream::synchronize_all(); // the drivers' own free does
    release(self(buffer).base);
    delete static_cast<Buffer *>(buffer->context);
}

void * get_base(ggml_backend_buffer_t buffer) { return self(buffer).base; }

size_t padding_of(const ggml_tensor * tensor) {
    const int64_t over = tensor->ne[0] % row_padding;
    return ggml_is_quantized(tensor->type) && over ? ggml_row_size(tensor->type, row_padding - over) : 0;
}

ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    const size_t padding = padding_of(tensor);
    if (padding && !tensor->view_src && buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        if (char * bytes = part_of(buffer, tensor, ggml_nbytes(tensor), padding, true, "padding")) {
            memset(bytes, 0, padding);
        }
    }
    return GGML_STATUS_SUCCESS;
}

// What follows is over when it returns, and waits for no stream: on CUDA it runs on a stream of the calling thread.

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    if (char * bytes = part_of(buffer, tensor, offset, size, true, "memset")) {
        memset(bytes, value, size);
    }
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    if (char * bytes = part_of(buffer, tensor, offset, size, true, "set")) {
        memcpy(bytes, data, size);
        Counters & count = self(buffer).device->count();
        count.sets += 1;
        count.bytes_to_device += (int64_t) size;
        count.pageable_bytes_to_device += is_pinned(data, size) ? 0 : (int64_t) size;
    }
}

void get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    if (const char * bytes = part_of(buffer, tensor, offset, size, false, "get")) {
        memcpy(data, bytes, size);
        self(buffer).device->count().gets += 1;
        self(buffer).device->count().bytes_to_host += (int64_t) size;
    }
}

bool cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * source, ggml_tensor * target) {
    if (!is_device_buffer(source->buffer)) {
        return false;
    }
    const size_t size = ggml_nbytes(source);
    const char * from = part_of(source->buffer, source, 0, size, false, "copy");
    char * to = part_of(buffer, target, 0, size, true, "copy");
    if (from && to) {
        memmove(to, from, size);
        self(buffer).device->count().copies += 1;
        self(buffer).device->count().bytes_within += (int64_t) size;
    }
    return true;
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    const int device = self(buffer).device->index;
    if (char * bytes = bytes_at(device, self(buffer).base, buffer->size)) {
        touch(device, bytes, buffer->size, true, "clear");
        memset(bytes, value, buffer->size);
    }
}

const char * get_name(ggml_backend_buffer_type_t type) { return self(type).name.c_str(); }
size_t get_alignment(ggml_backend_buffer_type_t) { return alignment; }
size_t get_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    return ggml_nbytes(tensor) + padding_of(tensor);
}
bool is_host(ggml_backend_buffer_type_t) { return false; }

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    const Device & device = self(type);
    void * base = allocate(device.index, size);
    if (base == nullptr) {
        GGML_LOG_ERROR("%s: no %zu bytes of memory: %zu of %zu are used\n", device.name.c_str(), size,
                       used_of(device.index), limit_of(device.index));
        return nullptr;
    }
    ggml_backend_buffer_i iface = {};
    iface.free_buffer = free_buffer;
    iface.get_base = get_base;
    iface.init_tensor = init_tensor;
    iface.memset_tensor = memset_tensor;
    iface.set_tensor = set_tensor;
    iface.get_tensor = get_tensor;
    iface.cpy_tensor = cpy_tensor;
    iface.clear = clear;
    return ggml_backend_buffer_init(type, iface, new Buffer{ &device, base }, size);
}

const char * host_name(ggml_backend_buffer_type_t) { return "FAKE_Host"; }
size_t host_alignment(ggml_backend_buffer_type_t) {
    return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
}
bool host_is_host(ggml_backend_buffer_type_t) { return true; }

// Unlike freeing device memory this waits for nobody: what is still being copied is a fault.
void free_host_buffer(ggml_backend_buffer_t buffer) { unpin(buffer->context); }

ggml_backend_buffer_t alloc_host_buffer(ggml_backend_buffer_type_t type, size_t size) {
    void * memory = pin(size);
    if (memory == nullptr) { // silently something else, as the real ones do
        return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    }
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(memory, size);
    buffer->buft = type;
    buffer->iface.free_buffer = free_host_buffer;
    return buffer;
}

} // namespace

bool is_device_buffer(ggml_backend_buffer_t buffer) { return buffer && buffer->iface.free_buffer == free_buffer; }

const Device & device_of(ggml_backend_buffer_t buffer) { return *self(buffer).device; }

ggml_backend_buffer_type_i device_buffer_interface() {
    ggml_backend_buffer_type_i iface = {};
    iface.get_name = get_name;
    iface.alloc_buffer = alloc_buffer;
    iface.get_alignment = get_alignment;
    iface.get_alloc_size = get_alloc_size;
    iface.is_host = is_host;
    return iface;
}

ggml_backend_buffer_type_i host_buffer_interface() {
    ggml_backend_buffer_type_i iface = {};
    iface.get_name = host_name;
    iface.alloc_buffer = alloc_host_buffer;
    iface.get_alignment = host_alignment;
    iface.is_host = host_is_host;
    return iface;
}

} // namespace fake_gpu
