#include "ggml_device/snapshot.h"

#include "driver/memory.h"
#include "driver/races.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cstring>
#include <set>

namespace fake_gpu {

namespace {

// What the vendors' backends skip too.
bool is_computed(const ggml_tensor * node) {
    return !ggml_op_is_empty(node->op) && (node->flags & GGML_TENSOR_FLAG_COMPUTE) && !ggml_is_empty(node);
}

} // namespace

Snapshot::Snapshot(const Device & device, const ggml_cgraph * graph) : device_(device) {
    const size_t n = std::max(graph->n_nodes, 1);
    context_.reset(ggml_init({ ggml_graph_overhead_custom(n, false) + 1024, nullptr, true }));
    graph_ = ggml_new_graph_custom(context_.get(), n, false);
    graph_->order = graph->order;
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        ggml_tensor * mine = copy(node);
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            mine->src[j] = node->src[j] ? copy(node->src[j]) : nullptr;
        }
        if (is_computed(node)) {
            check(node, node);
            std::for_each(node->src, node->src + GGML_MAX_SRC, [&](const ggml_tensor * source) {
                if (source) {
                    check(node, source);
                }
            });
        }
        graph_->nodes[graph_->n_nodes++] = mine;

        // What the kernels fuse depends on how often the engine's whole graph reads a node.
        const size_t place = ggml_hash_insert(&graph_->visited_hash_set, mine);
        if (place != GGML_HASHSET_ALREADY_EXISTS) {
            graph_->use_counts[place] = ggml_node_get_use_count(graph, i);
        }
    }
}

ggml_tensor * Snapshot::copy(const ggml_tensor * tensor) {
    if (const auto found = copies_.find(tensor); found != copies_.end()) {
        return found->second;
    }
    tensors_.push_back(*tensor);
    ggml_tensor * mine = &tensors_.back();
    copies_[tensor] = mine;
    mine->buffer = nullptr; // kernels know addresses only
    mine->data = tensor->data ? bytes_at(device_.index, tensor->data, ggml_nbytes(tensor)) : nullptr;
    std::fill_n(mine->src, GGML_MAX_SRC, nullptr); // set by the constructor for nodes
    mine->view_src = tensor->view_src ? copy(tensor->view_src) : nullptr;
    return mine;
}

void Snapshot::check(const ggml_tensor * node, const ggml_tensor * used) {
    if (ggml_is_empty(used) || !problem_.empty()) {
        return;
    }
    const std::string what = std::string(ggml_op_name(node->op)) + " " + node->name + " uses " + used->name;
    if (copies_[used]->data == nullptr) {
        problem_ = what + " outside of the device's memory";
    } else if (!switches.foreign_types && (used->buffer == nullptr || used->buffer->buft != &device_.buffer_type)) {
        problem_ = what + " in a buffer of type " + (used->buffer ? ggml_backend_buffer_name(used->buffer) : "none");
    }
}

void Snapshot::touch_memory() const {
    for (int i = 0; i < graph_->n_nodes && switches.races; i++) {
        const ggml_tensor * node = graph_->nodes[i];
        if (!is_computed(node)) {
            continue;
        }
        const std::string what = std::string(ggml_op_name(node->op)) + " " + node->name;
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            const ggml_tensor * source = node->src[j];
            if (source == nullptr || ggml_is_empty(source)) {
                continue;
            }
            if (j == 0 && node->op == GGML_OP_MUL_MAT_ID && !computes(node->src[2])) {
                touch_experts(node, what);
                continue;
            }
            touch(device_.index, static_cast<const char *>(source->data), ggml_nbytes(source), false, what);
        }
        touch(device_.index, static_cast<const char *>(node->data), ggml_nbytes(node), true, what);
    }
}

bool Snapshot::computes(const ggml_tensor * mine) const {
    const ggml_tensor * base = mine->view_src ? mine->view_src : mine;
    return std::any_of(graph_->nodes, graph_->nodes + graph_->n_nodes, [&](const ggml_tensor * node) {
        return is_computed(node) && (node == base || node->view_src == base);
    });
}

void Snapshot::touch_experts(const ggml_tensor * node, const std::string & what) const {
    const ggml_tensor * experts = node->src[0];
    const ggml_tensor * ids = node->src[2];
    std::set<int32_t> chosen;
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        for (int64_t k = 0; k < ids->ne[0]; k++) {
            int32_t id;
            memcpy(&id, static_cast<const char *>(ids->data) + token * ids->nb[1] + k * ids->nb[0], sizeof(id));
            chosen.insert(id);
        }
    }
    for (const int32_t id : chosen) {
        if (id < 0 || id >= experts->ne[2]) {
            fault(device_.index,
                  what + " chooses expert " + std::to_string(id) + " of " + std::to_string(experts->ne[2]));
            continue;
        }
        touch(device_.index, static_cast<const char *>(experts->data) + id * experts->nb[2],
              experts->ne[1] * experts->nb[1], false, what);
    }
}

} // namespace fake_gpu
