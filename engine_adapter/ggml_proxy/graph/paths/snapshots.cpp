#include "graph/paths/snapshots.h"

#include "slab/compute_buffer.h"
#include "ggml-impl.h"

#include <algorithm>

namespace expertier {

ggml_tensor * without_graph(ggml_context * context, const ggml_tensor * tensor) {
    ggml_tensor * leaf = ggml_new_tensor_3d(context, tensor->type, tensor->ne[0], tensor->ne[1], tensor->ne[2]);
    std::copy(tensor->nb, tensor->nb + GGML_MAX_DIMS, leaf->nb);
    leaf->data = tensor->data;
    leaf->buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    return leaf;
}

bool Snapshots::take(ggml_backend_t backend, const ExpertChain & chain) {
    for (const ggml_tensor * input : chain.inputs) {
        copies_[input] = ggml_new_tensor_3d(scope_.context, input->type, input->ne[0], input->ne[1], input->ne[2]);
    }
    buffer_ = ggml_backend_alloc_ctx_tensors(scope_.context, backend);
    if (buffer_ == nullptr) {
        return false;
    }
    ggml_backend_synchronize(backend);
    for (const ggml_tensor * input : chain.inputs) {
        copy(input);
    }
    return true;
}

void Snapshots::retake(const ggml_cgraph * graph, int begin, int end) {
    for (const auto & entry : copies_) {
        const ggml_tensor * input = entry.first;
        const bool made = std::any_of(graph->nodes + begin, graph->nodes + end, [input](const ggml_tensor * node) {
            return node == input || node == input->view_src;
        });
        if (made) {
            copy(input);
        }
    }
}

const ggml_tensor * Snapshots::of(const ggml_tensor * input) const {
    const auto found = copies_.find(input);
    return found == copies_.end() ? input : found->second;
}

void Snapshots::copy(const ggml_tensor * input) {
    ggml_tensor * to = copies_.at(input);
    ggml_tensor * from = without_graph(scope_.context, input);
    std::copy(to->nb, to->nb + GGML_MAX_DIMS, from->nb); // both are contiguous, so that their strides may be equated
    from->buffer = real_buffer(from->buffer);
    ggml_backend_tensor_copy(from, to);
}

} // namespace expertier
