#include "lookup/plan.h"

#include "graph/expert_call.h"
#include "lookup/device_lookup.h"
#include "ggml-impl.h"
#include "graph/segments.h"
#include "residency/tiers.h"

#include <cstring>

namespace expertier {

namespace {

constexpr int64_t captured_tokens = 4; // for which CUDA's backend has kernels of its own for every quantised type

// Whether the node changes a state that it has read: a graph with one cannot be run again.
bool is_stateful(const ggml_tensor * node) {
    const char * name = ggml_op_name(node->op);
    return strstr(name, "SSM") || strstr(name, "WKV") || strstr(name, "GATED") || strstr(name, "DELTA");
}

bool is_fit(LookupPlan & plan, const ggml_cgraph * graph) {
    const ggml_tensor * ids = nullptr;
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        if (is_stateful(node)) {
            return false;
        }
        if (node->op ==
            GGML_OP_MUL_MAT_ID) { // CUDA's backend reads ids back for what is not quantised, and in larger batches
            plan.may_be_captured &= ggml_is_quantized(node->src[0]->type) && node->src[2]->ne[1] <= captured_tokens;
        }
        const ExpertTensor * expert = find_expert_operand(node);
        if (expert == nullptr || ggml_is_empty(node)) {
            continue;
        }
        if (plan.tiers && plan.tiers != expert->tiers) {
            return false;
        }
        plan.tiers = expert->tiers;
        const int layer = expert->ref.layer;
        const int64_t n_rows = node->src[2]->ne[0] * node->src[2]->ne[1];
        const bool is_next = plan.calls.empty() || plan.calls.back().layer != layer || node->src[2] != ids;
        if (is_next) {
            for (const LookupPlan::Call & call : plan.calls) {
                if (call.layer == layer) { // a layer has one mailbox, and one look-up a graph
                    return false;
                }
            }
            ids = node->src[2];
            plan.calls.push_back({ i, layer, ids->ne[0], ids->ne[1], find_router(ids) });
        }
        if (n_rows > DeviceLookup::max_rows || n_rows > plan.tiers->slots().n_slots(layer) ||
            ids->type != GGML_TYPE_I32 || (plan.tiers->prefill_stream() && ids->ne[1] >= plan.tiers->stream_tokens())) {
            return false;
        }
        plan.nodes.push_back({ i, layer, expert->ref.matrix, (int) plan.calls.size() - 1 });
    }
    return !plan.calls.empty();
}

} // namespace

void look_at(LookupPlan & plan, const ggml_cgraph * graph) {
    const uint64_t uid = graph_uid(graph);
    plan.n_of_uid = uid != 0 && uid == plan.uid ? plan.n_of_uid + 1 : 1;
    if (uid != 0 && uid == plan.uid && (!plan.tiers || plan.tiers->slots().epoch() == plan.epoch)) {
        plan.n_seen += 1;
        return;
    }
    plan.uid = uid;
    plan.n_seen = 1;
    plan.tiers.reset();
    plan.nodes.clear();
    plan.calls.clear();
    plan.may_be_captured = true;
    plan.rare_miss_layers_are_chosen = false;
    plan.is_fit = uid != 0 && is_fit(plan, graph);
    plan.epoch = plan.tiers ? plan.tiers->slots().epoch() : 0;
    if (plan.is_fit) {
        plan.inputs.find(graph);
    }
}

} // namespace expertier
