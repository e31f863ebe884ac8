#include "graph/segments.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

namespace expertier {

namespace {

// The engine numbers its graphs, and backends take graphs of one number for the same graph. A segment gets a number
// made from its graph's, so that the inner backend need not compare it node by node with the segment of the run before.
template <typename G> auto uid_of(const G * graph, int) -> decltype((uint64_t) graph->uid) { return graph->uid; }
template <typename G> uint64_t uid_of(const G *, long) { return 0; }
template <typename G> auto set_uid(G & graph, uint64_t uid, int) -> decltype(graph.uid, void()) { graph.uid = uid; }
template <typename G> void set_uid(G &, uint64_t, long) {}

} // namespace

uint64_t graph_uid(const ggml_cgraph * graph) { return uid_of(graph, 0); }

uint64_t mixed(uint64_t a, uint64_t b) {
    a = (a ^ (b + 0x9e3779b97f4a7c15u + (a << 6) + (a >> 2))) * 0xbf58476d1ce4e5b9u;
    return a ^ (a >> 31);
}

GraphSegments::~GraphSegments() {
    for (auto undo = redirected_.rbegin(); undo != redirected_.rend(); ++undo) {
        undo->node->src[0] = undo->experts;
        undo->node->src[2] = undo->ids;
    }
}

ggml_status GraphSegments::run_until(int end) {
    if (next_ >= end) {
        return GGML_STATUS_SUCCESS;
    }
    ggml_cgraph segment = ggml_graph_view(graph_, next_, end);
    if (const uint64_t uid = graph_uid(graph_)) {
        set_uid(segment, mixed(mixed(mixed(uid, next_), end), placed_) | 1, 0);
    }
    std::vector<ggml_tensor *> nodes;
    if (leading_ != nullptr) {
        set_uid(segment, 0, 0);
        nodes.push_back(leading_->next(n_segments_, segment.nodes[0]));
        nodes.insert(nodes.end(), segment.nodes, segment.nodes + segment.n_nodes);
        segment.nodes = nodes.data();
        segment.n_nodes = (int) nodes.size();
    }
    next_ = end;
    n_segments_ += 1;
    return ggml_backend_graph_compute_async(backend_.inner, &segment);
}

void GraphSegments::redirect(ggml_tensor * node, ggml_tensor * experts, ggml_tensor * ids) {
    redirected_.push_back({ node, node->src[0], node->src[2] });
    node->src[0] = experts;
    node->src[2] = ids;
    // The tensor over a layer's slots is always the same object, but its address and its number of slots change.
    for (uint64_t part :
         { (uint64_t) reinterpret_cast<uintptr_t>(experts), (uint64_t) reinterpret_cast<uintptr_t>(experts->data),
           (uint64_t) experts->ne[2], (uint64_t) reinterpret_cast<uintptr_t>(ids->data) }) {
        placed_ = mixed(placed_, part);
    }
}

} // namespace expertier
