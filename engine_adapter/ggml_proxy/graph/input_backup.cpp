#include "graph/input_backup.h"

#include "slab/compute_buffer.h"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <unordered_set>

namespace expertier {

namespace {

constexpr size_t alignment = 256; // of the beginning of each copy

} // namespace

void InputBackup::find(const ggml_cgraph * graph) {
    inputs_.clear();
    n_bytes_ = 0;
    std::unordered_set<const ggml_tensor *> known(graph->nodes, graph->nodes + graph->n_nodes);
    for (int i = 0; i < graph->n_nodes; i++) {
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            const ggml_tensor * source = graph->nodes[i]->src[j];
            const ggml_tensor * base = source && source->view_src ? source->view_src : source;
            // Weights and key-value caches lie in buffers that are not for computing: no node is given their memory.
            if (base == nullptr || base->buffer == nullptr ||
                base->buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE || ggml_is_empty(base) ||
                !known.insert(base).second) {
                continue;
            }
            inputs_.push_back({ real_buffer(base->buffer), base->data, ggml_nbytes(base), n_bytes_ });
            n_bytes_ += (ggml_nbytes(base) + alignment - 1) / alignment * alignment;
        }
    }
}

bool InputBackup::reserve(ggml_backend_t backend) {
    if (n_bytes_ > 0 && (!copies_ || ggml_backend_buffer_get_size(copies_.get()) < n_bytes_)) {
        ggml_backend_synchronize(backend); // a queued restore may still read the copies
        copies_ = new_device_buffer(ggml_backend_get_device(backend), n_bytes_);
        if (!copies_) {
            return false;
        }
    }
    rows_.clear();
    for (const Input & input : inputs_) {
        rows_.push_back(
            { reinterpret_cast<uint64_t>(copy_of(input)), reinterpret_cast<uint64_t>(input.data), input.n_bytes });
    }
    return true;
}

void InputBackup::restore(ggml_backend_t backend) {
    for (const Input & input : inputs_) {
        ggml_tensor copied = bytes_at(copies_.get(), copy_of(input), input.n_bytes);
        ggml_tensor given = bytes_at(input.buffer, input.data, input.n_bytes);
        ggml_backend_tensor_copy_async(backend, backend, &copied, &given);
    }
}

char * InputBackup::copy_of(const Input & input) const {
    return static_cast<char *>(ggml_backend_buffer_get_base(copies_.get())) + input.offset;
}

} // namespace expertier
