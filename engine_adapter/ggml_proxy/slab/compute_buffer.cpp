#include "slab/compute_buffer.h"

#include "backend/device_memory.h"
#include "backend/expert_buffer.h"
#include "residency/tiers.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "residency/errors.h"

#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <vector>

namespace expertier {

namespace {

struct ComputeBuffer {
    std::shared_ptr<ComputeRegion> region;
    ComputeRegion::Place * place;
};

// Found by ggml's buffer object, because a compute buffer's context is the slab's.
std::mutex mutex;
std::unordered_map<ggml_backend_buffer_t, ComputeBuffer> buffers;

ComputeBuffer find(ggml_backend_buffer_t buffer) {
    std::lock_guard<std::mutex> guard(mutex);
    return buffers.at(buffer);
}

const ggml_backend_buffer_i & inner(const ComputeBuffer & self) { return self.region->slab()->iface; }

ggml_backend_buffer_t buffer_of(const ggml_tensor * tensor) {
    return tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
}

void forget(ggml_backend_buffer_t buffer) {
    std::lock_guard<std::mutex> guard(mutex);
    buffers.erase(buffer);
}

// Gives the buffer memory of its own instead of a place in the slab: it is no compute buffer, so ggml does not say
// which part of it is in use. False when the device has no memory left.
bool become_ordinary(ggml_backend_buffer_t buffer, const ComputeBuffer & self) {
    ggml_backend_buffer_t own = ggml_backend_buft_alloc_buffer(buffer->buft, buffer->size);
    if (own == nullptr) {
        return false;
    }
    forget(buffer);
    self.region->free(self.place);
    buffer->iface = own->iface;
    buffer->context = own->context;
    own->iface.free_buffer = nullptr; // its memory belongs to `buffer` now
    ggml_backend_buffer_free(own);
    return true;
}

// ggml marks a compute buffer as such before it asks for the address, so a buffer without the mark is none.
void * get_base(ggml_backend_buffer_t buffer) {
    const ComputeBuffer self = find(buffer);
    if (buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        if (become_ordinary(buffer, self)) {
            return buffer->iface.get_base(buffer);
        }
        self.region->need(*self.place, buffer->size);
        if (!self.region->make_room(*self.place)) {
            GGML_LOG_ERROR("no memory for a buffer of %zu bytes, inside the slab or outside of it\n", buffer->size);
            return nullptr;
        }
    }
    return self.region->base(*self.place);
}

void free_buffer(ggml_backend_buffer_t buffer) {
    const ComputeBuffer self = find(buffer);
    forget(buffer);
    self.region->free(self.place);
}

// ggml calls this when it begins to place a graph; afterwards it gives every tensor of the graph its address.
void reset(ggml_backend_buffer_t buffer) {
    const ComputeBuffer self = find(buffer);
    self.region->begin_placing(*self.place);
}

ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    const ComputeBuffer self = find(buffer);
    if (tensor->view_src == nullptr) {
        const size_t begin = static_cast<char *>(tensor->data) - static_cast<char *>(self.region->base(*self.place));
        self.region->need(*self.place, begin + ggml_backend_buft_get_alloc_size(buffer->buft, tensor));
    }
    return inner(self).init_tensor ? inner(self).init_tensor(buffer, tensor) : GGML_STATUS_SUCCESS;
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    const ComputeBuffer self = find(buffer);
    if (self.region->make_room(*self.place)) {
        inner(self).set_tensor(buffer, tensor, data, offset, size);
    }
}

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    const ComputeBuffer self = find(buffer);
    if (self.region->make_room(*self.place)) {
        inner(self).memset_tensor(buffer, tensor, value, offset, size);
    }
}

void set_tensor_2d(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size,
                   size_t n_copies, size_t stride_tensor, size_t stride_data) {
    const ComputeBuffer self = find(buffer);
    if (self.region->make_room(*self.place)) {
        inner(self).set_tensor_2d(buffer, tensor, data, offset, size, n_copies, stride_tensor, stride_data);
    }
}

bool cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * source, ggml_tensor * target) {
    const ComputeBuffer self = find(buffer);
    if (is_expert_memory(source)) {
        return false; // ggml then copies through host memory
    }
    if (!self.region->make_room(*self.place)) {
        return true; // nothing is written; the next graph fails and says why
    }
    const ggml_tensor from = in_real_buffer(source);
    ggml_tensor to = in_real_buffer(target);
    return inner(self).cpy_tensor(to.buffer, &from, &to);
}

// The inner backend's `clear` would clear the slab from its beginning, instead of the buffer's place in it.
void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    const ComputeBuffer self = find(buffer);
    self.region->need(*self.place, buffer->size);
    if (self.region->make_room(*self.place)) {
        ggml_tensor all = bytes_at(self.region->slab(), self.region->base(*self.place), buffer->size);
        ggml_backend_tensor_memset(&all, value, 0, buffer->size);
    }
}

} // namespace

ggml_backend_buffer_t new_compute_buffer(std::shared_ptr<ComputeRegion> region, size_t size) {
    ComputeRegion::Place * place = region->allocate(size);
    if (place == nullptr) {
        return nullptr;
    }
    ggml_backend_buffer_t slab = region->slab();
    ggml_backend_buffer_i iface = slab->iface;
    iface.free_buffer = free_buffer;
    iface.get_base = get_base;
    iface.reset = reset;
    iface.init_tensor = init_tensor;
    iface.clear = clear;
    iface.set_tensor = set_tensor;
    // Optional calls exist exactly when they exist on the slab: ggml asks by null checks.
    iface.memset_tensor = slab->iface.memset_tensor ? memset_tensor : nullptr;
    iface.set_tensor_2d = slab->iface.set_tensor_2d ? set_tensor_2d : nullptr;
    iface.cpy_tensor = slab->iface.cpy_tensor ? cpy_tensor : nullptr;
    ggml_backend_buffer_t buffer = ggml_backend_buffer_init(slab->buft, iface, slab->context, size);

    std::lock_guard<std::mutex> guard(mutex);
    buffers[buffer] = { std::move(region), place };
    return buffer;
}

void try_out(const std::shared_ptr<ComputeRegion> & region, ggml_backend_dev_t device) {
    constexpr int64_t n = 64;
    constexpr size_t apart = 4096; // more than any device aligns tensors to

    std::unique_ptr<ggml_context, decltype(&ggml_free)> scope(
        ggml_init({ 8 * ggml_tensor_overhead() + ggml_graph_overhead_custom(8, false), nullptr, true }), &ggml_free);
    std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)> backend(ggml_backend_dev_init(device, nullptr),
                                                                        &ggml_backend_free);
    Buffer buffer(new_compute_buffer(region, 3 * apart));
    if (!backend || !buffer) {
        throw std::runtime_error("there is no stream of the device, or no place in the slab, for a trial computation");
    }
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_COMPUTE);
    ggml_tensor * a = ggml_new_tensor_1d(scope.get(), GGML_TYPE_F32, n);
    ggml_tensor * b = ggml_new_tensor_1d(scope.get(), GGML_TYPE_F32, n);
    ggml_tensor * sum = ggml_add(scope.get(), a, b);
    ggml_cgraph * graph = ggml_new_graph_custom(scope.get(), 8, false);
    ggml_build_forward_expand(graph, sum);

    ggml_backend_buffer_reset(buffer.get());
    char * at = static_cast<char *>(ggml_backend_buffer_get_base(buffer.get()));
    for (ggml_tensor * tensor : { a, b, sum }) {
        ggml_backend_tensor_alloc(buffer.get(), tensor, at);
        at += apart;
    }
    std::vector<float> ones(n, 1), twos(n, 2), found(n, 0);
    ggml_backend_tensor_set(a, ones.data(), 0, n * sizeof(float));
    ggml_backend_tensor_set(b, twos.data(), 0, n * sizeof(float));
    const ggml_status status = ggml_backend_graph_compute(backend.get(), graph);
    ggml_backend_tensor_get(sum, found.data(), 0, n * sizeof(float));
    if (status != GGML_STATUS_SUCCESS || found != std::vector<float>(n, 3)) {
        throw std::runtime_error("a trial computation in a part of the slab gave " + std::to_string(found[0]) +
                                 " instead of 3");
    }
}

bool is_compute_buffer(ggml_backend_buffer_t buffer) { return buffer && buffer->iface.free_buffer == free_buffer; }

ggml_backend_buffer_t real_buffer(ggml_backend_buffer_t buffer) {
    return is_compute_buffer(buffer) ? find(buffer).region->slab() : buffer;
}

ggml_tensor in_real_buffer(const ggml_tensor * tensor) {
    ggml_tensor alias = *tensor;
    alias.buffer = real_buffer(buffer_of(tensor));
    alias.view_src = nullptr;
    alias.view_offs = 0;
    return alias;
}

bool may_write(const ggml_tensor * tensor) {
    ggml_backend_buffer_t buffer = buffer_of(tensor);
    if (!is_compute_buffer(buffer)) {
        return true;
    }
    const ComputeBuffer self = find(buffer);
    return self.region->make_room(*self.place);
}

bool make_room(const ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        ggml_backend_buffer_t buffer = buffer_of(graph->nodes[i]);
        if (!is_compute_buffer(buffer)) {
            continue;
        }
        // The buffer type sets no limit to a buffer's size, so all nodes that are no part of a cache lie in one buffer.
        const ComputeBuffer self = find(buffer);
        std::string failure;
        self.region->make_room(*self.place);
        if (self.region->take_failure(*self.place, failure)) {
            set_error(failure);
            return false;
        }
        self.region->lower_boundary();
        return true;
    }
    return true;
}

} // namespace expertier
