#include "graph/expert_call.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "residency/errors.h"

#include <cstring>

namespace expertier {

const ExpertTensor * find_expert_operand(const ggml_tensor * node) {
    const bool runs = node->flags & GGML_TENSOR_FLAG_COMPUTE; // backends skip nodes without this flag, so we do too
    return runs && node->op == GGML_OP_MUL_MAT_ID ? find_expert_tensor(node->src[0]) : nullptr;
}

bool belongs(const ExpertCall & call, const ggml_tensor * node) {
    const ExpertTensor * expert = find_expert_operand(node);
    return expert && expert->tiers == call.tiers && expert->ref.layer == call.layer && node->src[2] == call.ids;
}

ExpertCall find_call(ggml_cgraph * graph, int first, const ExpertTensor & expert) {
    ExpertCall call;
    call.tiers = expert.tiers;
    call.layer = expert.ref.layer;
    call.ids = graph->nodes[first]->src[2];
    call.n_used = call.ids->ne[0];
    call.n_tokens = call.ids->ne[1];
    call.first = first;
    call.last = first;
    for (int i = first + 1; i < graph->n_nodes; i++) {
        if (belongs(call, graph->nodes[i])) {
            call.last = i;
        } else if (find_expert_operand(graph->nodes[i])) {
            break; // the next layer's call begins here
        }
    }
    return call;
}

bool read_ids(ggml_backend_t backend, PinnedInts & room, ExpertCall & call) {
    const ggml_tensor * ids = call.ids;
    const char * data = static_cast<const char *>(ids->data);
    if (ggml_backend_buffer_is_host(ids->buffer)) {
        ggml_backend_synchronize(backend);
    } else {
        const size_t n_bytes = ggml_nbytes(ids);
        int32_t * copy = room.reserve(backend, (n_bytes + sizeof(int32_t) - 1) / sizeof(int32_t));
        ggml_backend_tensor_get_async(backend, ids, copy, 0, n_bytes);
        ggml_backend_synchronize(backend);
        data = reinterpret_cast<const char *>(copy);
    }
    call.tiers->counters.id_reads += 1;

    const int n_experts = call.tiers->slots().n_experts(call.layer);
    std::vector<char> chosen(n_experts, 0);
    call.expert_of_row.resize(call.n_used * call.n_tokens);
    for (int64_t token = 0; token < call.n_tokens; token++) {
        for (int64_t k = 0; k < call.n_used; k++) {
            int32_t expert;
            memcpy(&expert, data + token * ids->nb[1] + k * ids->nb[0], sizeof(expert));
            if (expert < 0 || expert >= n_experts) {
                set_error("layer " + std::to_string(call.layer) + ": the router chose expert " +
                          std::to_string(expert) + " of " + std::to_string(n_experts));
                return false;
            }
            call.expert_of_row[token * call.n_used + k] = expert;
            chosen[expert] = 1;
        }
    }
    for (int expert = 0; expert < n_experts; expert++) {
        if (chosen[expert]) {
            call.experts.push_back(expert);
        }
    }
    return true;
}

} // namespace expertier
