// Between two cuts a segment of the graph runs on the inner backend. At a cut the expert ids of the next layer are
// known, and the layer's nodes are redirected to where its experts are. The redirection is undone when the run ends.
//
//     ... attention, router | gate, up, GLU, down, attention, router | gate, up, ...
//                           ^ cut of layer l                         ^ cut of layer l + 1: l is done, end its path
//
// A layer's path (layer_path.h) decides how the layer is served, and whether that needs a cut and the ids at all.

#include "graph/graph.h"

#include "slab/compute_buffer.h"
#include "backend/device.h"
#include "graph/expert_call.h"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "lookup/run.h"
#include "graph/path_choice.h"
#include "graph/segments.h"
#include "residency/errors.h"

#include <cxxabi.h>
#include <new>
#include <optional>
#include <string>

namespace expertier {

namespace {

class GraphRun : public SuspendedGraph {
  public:
    GraphRun(ProxyBackend & backend, ggml_cgraph * graph)
        : backend_(backend), graph_(graph), segments_(backend, graph), paths_(backend, graph, segments_) {}
    GraphRun(const GraphRun &) = delete;
    GraphRun & operator=(const GraphRun &) = delete;

    // However the run ended, no slot stays pinned for longer than queued work may read it.
    ~GraphRun() override {
        if (backend_.group && path_) {
            path_->defer();
        }
        end_layer(false);
        if (tiers_) {
            tiers_->counters.segments += segments_.n_segments();
        }
    }

    ggml_status run() {
        if (!check()) {
            return GGML_STATUS_FAILED;
        }
        const ggml_status status = finish();
        end_layer(false);
        return status;
    }

    // Queues the nodes that need nothing of the host; finish() queues the rest.
    ggml_status begin() {
        if (!check()) {
            return GGML_STATUS_FAILED;
        }
        if (ggml_status status = run_nodes(true)) {
            return status;
        }
        return segments_.run_until(node_);
    }

    bool is_done() const { return segments_.next() == graph_->n_nodes; }

    ggml_status finish() override {
        if (ggml_status status = run_nodes(false)) {
            return status;
        }
        return segments_.run_until(graph_->n_nodes);
    }

  private:
    // Whether we can run this graph; checked again only when the engine has made a new graph.
    bool check() {
        const uint64_t uid = graph_uid(graph_);
        if ((uid == 0 || uid != backend_.served_uid) && !is_served()) {
            return false;
        }
        backend_.served_uid = uid;
        return true;
    }

    // From `node_` on, redirects expert nodes and cuts the graph before layers: to the end, or only to the first cut.
    ggml_status run_nodes(bool stops_at_cut) {
        for (int & i = node_; i < graph_->n_nodes; i++) {
            ggml_tensor * node = graph_->nodes[i];
            const ExpertTensor * expert = find_expert_operand(node);
            if (expert == nullptr || ggml_is_empty(node)) {
                continue; // a call with 0 rows computes nothing, on the inner backend as well
            }
            begin_graph(expert->tiers);
            if (LayerPath * path = paths_.by_layer(*expert)) {
                path->redirect(node, *expert);
                continue;
            }
            if (!path_ || !belongs(call_, node)) {
                if (stops_at_cut) {
                    return GGML_STATUS_SUCCESS;
                }
                if (ggml_status status = cut(i, *expert)) {
                    return status;
                }
                if (segments_.next() > i) { // the path has run the layer's nodes
                    end_layer(false);
                    i = segments_.next() - 1;
                    continue;
                }
            }
            path_->redirect(node, *expert);
        }
        return GGML_STATUS_SUCCESS;
    }

    // The engine asks a device whether it can run a node before it places the node there. A graph of whose nodes it did
    // not ask would read addresses that have no memory, and end the process.
    bool is_served() const {
        const std::string misplacement = find_misplacement(graph_);
        if (!misplacement.empty()) {
            set_error(misplacement);
            return false;
        }
        for (int i = 0; i < graph_->n_nodes; i++) {
            const ggml_tensor * node = graph_->nodes[i];
            if (!(node->flags & GGML_TENSOR_FLAG_COMPUTE) || ggml_is_empty(node)) {
                continue; // backends skip it
            }
            if (const ggml_tensor * source = find_unserved_source(node)) {
                set_error(std::string("the engine runs ") + ggml_op_name(node->op) + " on " + source->name +
                          ", but the tiers serve MUL_MAT_ID on full expert tensors only");
                return false;
            }
        }
        return true;
    }

    void begin_graph(const std::shared_ptr<Tiers> & tiers) {
        if (!tiers_) {
            tiers_ = tiers;
            tiers_->counters.graphs += 1;
        }
    }

    // Runs everything before node `first`, then has the layer that starts there served.
    ggml_status cut(int first, const ExpertTensor & expert) {
        if (ggml_status status = segments_.run_until(first)) {
            return status;
        }
        ExpertCall call = find_call(graph_, first, expert);
        LayerPath * path = paths_.by_rows(call);
        if (path) {
            end_layer(false);
            release_deferred(backend_);
        } else {
            const bool ids_are_valid = read_ids(backend_.inner, backend_.read_room, call); // waits for the backend
            backend_.deferred.take(); // dropped: nothing that is queued reads these slots any more
            end_layer(true); // before waiting for slots: a context never holds slots of one layer and waits for another
            if (!ids_are_valid) {
                return GGML_STATUS_FAILED;
            }
            path = &paths_.by_experts(call);
        }
        call_ = std::move(call);
        path_ = path;
        return path_->begin(call_);
    }

    void end_layer(bool backend_is_idle) {
        if (path_) {
            path_->end(backend_is_idle);
            path_ = nullptr;
            call_.tiers.reset();
        }
    }

    ProxyBackend & backend_;
    ggml_cgraph * graph_;
    GraphSegments segments_;
    int node_ = 0;                 // the first node that run_nodes() has not looked at
    std::shared_ptr<Tiers> tiers_; // the tiers of the graph's experts; null until the first expert node
    ExpertCall call_;              // the call of the open layer
    PathChoice paths_;
    LayerPath * path_ = nullptr; // the path of the open layer; null while no layer is open
};

// The slots of a layer stay pinned until the backend is waited for anyway, because a further wait for each layer would
// leave the device without work.
ggml_status compute_in_group(ProxyBackend & backend, ggml_cgraph * graph) {
    struct Waiting { // after the last backend's share, or after a failure, no graph of the group is left waiting
        BackendGroup & group;
        bool keeps = false;
        ~Waiting() {
            if (!keeps) {
                group.waiting.clear();
            }
        }
    } waiting{ *backend.group };

    auto run = std::make_unique<GraphRun>(backend, graph);
    if (ggml_status status = run->begin()) {
        return status;
    }
    if (!run->is_done()) {
        waiting.group.waiting.push_back(std::move(run)); // make_group() has reserved the memory
    }
    if (&backend != waiting.group.last) {
        waiting.keeps = true;
        return GGML_STATUS_SUCCESS;
    }
    for (const auto & one : waiting.group.waiting) {
        if (ggml_status status = one->finish()) {
            return status;
        }
    }
    return GGML_STATUS_SUCCESS;
}

} // namespace

ggml_status compute_graph(ProxyBackend & backend, ggml_cgraph * graph) {
    try {
        if (backend.group) {
            return compute_in_group(backend, graph);
        }
        release_deferred(backend);
        if (!make_room(graph)) {
            return GGML_STATUS_FAILED;
        }
        backend.device->follow_demand();
        RunLock::Run running(backend.device->runs);
        if (const std::optional<ggml_status> done = try_device_lookup(backend, graph)) {
            return *done;
        }
        return GraphRun(backend, graph).run();
    } catch (const std::bad_alloc &) { // no exception may pass through ggml's C frames
        return GGML_STATUS_ALLOC_FAILED;
    } catch (abi::__forced_unwind &) {
        throw; // Python ends a thread that asks for its lock while the process ends, and that must not be stopped
    } catch (...) {
        return GGML_STATUS_FAILED;
    }
}

} // namespace expertier
