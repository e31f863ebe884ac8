// Between two cuts a segment of the graph runs on the inner backend. At a cut the expert ids of the next layer are
// known: they are read once, looked up, and the layer's nodes are pointed at the slots until the run ends.
//
//     ... attention, router | gate, up, GLU, down, attention, router | gate, up, ...
//                           ^ cut of layer l                         ^ cut of layer l + 1: l is done, release it
//
// A layer whose experts are all in the slots of their own numbers needs no cut, and a large batch no ids: it is pointed
// at a streamed layer (prefill_stream.h), which is being uploaded while the layer before it computes.

#include "graph/graph.h"

#include "slab/compute_buffer.h"
#include "backend/device.h"
#include "graph/expert_call.h"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "lookup/run.h"
#include "graph/passes.h"
#include "graph/segments.h"
#include "graph/prefill_stream.h"

#include <cxxabi.h>
#include <new>
#include <numeric>
#include <optional>
#include <string>

namespace expertier {

namespace {

// From so many rows a layer on average, every expert is likely to be among them: all are streamed, and no ids are read.
constexpr int64_t rows_an_expert = 4;

class GraphRun : public SuspendedGraph {
  public:
    GraphRun(ProxyBackend & backend, ggml_cgraph * graph)
        : backend_(backend), graph_(graph), segments_(backend, graph) {}
    GraphRun(const GraphRun &) = delete;
    GraphRun & operator=(const GraphRun &) = delete;

    // Whatever happened, no slot stays pinned for longer than what is queued may read it.
    ~GraphRun() override {
        if (backend_.group) {
            defer_layer();
        }
        release_layer();
        if (tiers_) {
            tiers_->counters.segments += segments_.n_segments();
        }
    }

    ggml_status run() {
        if (!check()) {
            return GGML_STATUS_FAILED;
        }
        const ggml_status status = finish();
        release_layer();
        return status;
    }

    // Queues all that needs nothing of the host; the rest is for finish().
    ggml_status begin() {
        if (!check()) {
            return GGML_STATUS_FAILED;
        }
        if (ggml_status status = run_nodes(true)) {
            return status;
        }
        return run_until(node_);
    }

    bool is_done() const { return segments_.next() == graph_->n_nodes; }

    ggml_status finish() override {
        if (ggml_status status = run_nodes(false)) {
            return status;
        }
        return run_until(graph_->n_nodes);
    }

  private:
    // Whether we can run this graph; looked at again only when the engine has made a new one.
    bool check() {
        const uint64_t uid = graph_uid(graph_);
        if ((uid == 0 || uid != backend_.served_uid) && !is_served()) {
            return false;
        }
        backend_.served_uid = uid;
        return true;
    }

    // Points nodes at experts and cuts before layers, from `node_` on: to the end, or to the first cut.
    ggml_status run_nodes(bool stops_at_cut) {
        for (int & i = node_; i < graph_->n_nodes; i++) {
            ggml_tensor * node = graph_->nodes[i];
            const ExpertTensor * expert = find_expert_operand(node);
            if (expert == nullptr || ggml_is_empty(node)) {
                continue; // a call with 0 rows is a no-op, on the inner backend too
            }
            begin_graph(expert->tiers);
            if (tiers_->is_fully_resident(expert->ref.layer)) {
                segments_.redirect(node, tiers_->slots(expert->ref), node->src[2]);
                tiers_->counters.fully_resident_calls += node->src[2] != last_resident_ids_;
                last_resident_ids_ = node->src[2];
                continue;
            }
            if (!call_.tiers || !belongs(call_, node)) {
                if (stops_at_cut) {
                    return GGML_STATUS_SUCCESS;
                }
                if (ggml_status status = cut(i, *expert)) {
                    return status;
                }
                if (!call_.tiers) { // the layer has run in passes
                    i = segments_.next() - 1;
                    continue;
                }
            }
            if (is_streamed_) {
                segments_.redirect(node, prefill_stream_->matrix(expert->ref.matrix), node->src[2]);
            } else {
                segments_.redirect(node, call_.tiers->slots(expert->ref), slot_ids_);
            }
        }
        return GGML_STATUS_SUCCESS;
    }

    // The engine asks before it gives a node to a device, but a graph that it did not ask for would read where no
    // bytes are, and end the process.
    bool is_served() const {
        const std::string misplacement = find_misplacement(graph_);
        if (!misplacement.empty()) {
            Tiers::fail(misplacement);
            return false;
        }
        for (int i = 0; i < graph_->n_nodes; i++) {
            const ggml_tensor * node = graph_->nodes[i];
            if (!(node->flags & GGML_TENSOR_FLAG_COMPUTE) || ggml_is_empty(node)) {
                continue; // backends skip it
            }
            if (const ggml_tensor * source = find_unserved_source(node)) {
                Tiers::fail(std::string("the engine runs ") + ggml_op_name(node->op) + " on " + source->name +
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

    // Runs everything before node `first`, then makes the experts of the layer that starts there resident. Where
    // they are more than the layer's slots, the layer runs in passes instead and no call is left open.
    ggml_status cut(int first, const ExpertTensor & expert) {
        if (ggml_status status = run_until(first)) {
            return status;
        }
        ExpertCall call = find_call(graph_, first, expert);
        if (can_stream(call) && call.n_tokens * call.n_used >= rows_an_expert * tiers_->n_experts(call.layer)) {
            release_layer();
            release_deferred(backend_);
            call.experts.resize(tiers_->n_experts(call.layer));
            std::iota(call.experts.begin(), call.experts.end(), 0);
            return stream_layer(std::move(call));
        }
        const bool ids_are_valid = read_ids(backend_.inner, backend_.read_room, call);
        nothing_reads_slots_ = true;
        backend_.deferred.clear();
        release_layer(); // before waiting for slots: a context never holds one layer while it waits for another
        if (!ids_are_valid) {
            return GGML_STATUS_FAILED;
        }
        const bool fits = (int) call.experts.size() <= tiers_->n_slots(call.layer);
        if (can_stream(call) || (!fits && tiers_->prefill_stream())) {
            if (!can_stream(call)) {
                tiers_->note_missed(call.layer, (int64_t) call.experts.size()); // more slots would have held them
            }
            return stream_layer(std::move(call));
        }
        if (!fits) {
            segments_.skip_to(call.last + 1);
            return run_in_passes(backend_, graph_, call);
        }
        nothing_reads_slots_ = false; // fills may be queued
        pinned_ = tiers_->acquire(backend_.inner, call.layer, call.experts);
        if (!pinned_) {
            return GGML_STATUS_FAILED;
        }
        call_ = std::move(call);
        return upload_slot_ids();
    }

    // A layer with a slot for every expert evicts nothing, and is better off with them in its slots.
    bool can_stream(const ExpertCall & call) const {
        return tiers_->prefill_stream() && call.n_tokens >= tiers_->stream_tokens() &&
               tiers_->n_slots(call.layer) < tiers_->n_experts(call.layer);
    }

    ggml_status stream_layer(ExpertCall && call) {
        if (!prefill_stream_) {
            prefill_stream_.emplace(*tiers_->prefill_stream(), backend_.inner);
            backend_.streamed = tiers_;
        }
        if (!prefill_stream_->bring(call.layer, call.experts)) {
            return GGML_STATUS_FAILED;
        }
        call_ = std::move(call);
        is_streamed_ = true;
        return GGML_STATUS_SUCCESS;
    }

    ggml_status upload_slot_ids() {
        std::vector<int32_t> slot_of(call_.tiers->n_experts(call_.layer), 0);
        for (size_t i = 0; i < call_.experts.size(); i++) {
            slot_of[call_.experts[i]] = pinned_.slots()[i];
        }
        std::vector<int32_t> slots(call_.expert_of_row.size());
        for (size_t i = 0; i < slots.size(); i++) {
            slots[i] = slot_of[call_.expert_of_row[i]];
        }
        LayerIds & ids = backend_.ids[call_.tiers->slots({ call_.layer, 0 })];
        slot_ids_ = ids.upload(backend_.inner, slots, call_.n_used, call_.n_tokens);
        if (slot_ids_ == nullptr) {
            Tiers::fail("no device memory for the slot ids of a batch");
            return GGML_STATUS_ALLOC_FAILED;
        }
        return GGML_STATUS_SUCCESS;
    }

    ggml_status run_until(int end) {
        nothing_reads_slots_ = nothing_reads_slots_ && segments_.next() >= end;
        return segments_.run_until(end);
    }

    // Lets go of the layer's slots when the backend has been waited for next.
    void defer_layer() {
        if (pinned_ && !nothing_reads_slots_) {
            try {
                backend_.deferred.push_back(std::move(pinned_));
                call_.tiers.reset();
            } catch (const std::bad_alloc &) { // nothing was moved: they are waited for now
            }
        }
    }

    void release_layer() {
        if (call_.tiers && !is_streamed_) {
            if (!nothing_reads_slots_) {
                ggml_backend_synchronize(backend_.inner); // queued segments still read the slots
            }
            pinned_.release();
        }
        call_.tiers.reset();
        is_streamed_ = false;
    }

    ProxyBackend & backend_;
    ggml_cgraph * graph_;
    GraphSegments segments_;
    int node_ = 0;                 // the first that has not been looked at
    std::shared_ptr<Tiers> tiers_; // of the graph's experts, once one was met
    ExpertCall call_;              // the layer that nodes are redirected for; none while call_.tiers is null
    bool is_streamed_ = false;     // it is in a streamed layer; otherwise its slots are pinned
    std::optional<PrefillStream::Use> prefill_stream_;
    bool nothing_reads_slots_ = false; // nothing that reads slots is queued
    const ggml_tensor * last_resident_ids_ = nullptr;
    PinnedSlots pinned_;
    ggml_tensor * slot_ids_ = nullptr;
};

// Slots of layers before stay pinned until the backend is waited for anyway: one wait more a layer would leave the
// device without work.
ggml_status compute_in_group(ProxyBackend & backend, ggml_cgraph * graph) {
    struct Waiting { // nobody is left waiting after the last one, or a failure
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
        waiting.group.waiting.push_back(std::move(run)); // there is room
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
    } catch (const std::bad_alloc &) { // ggml's C frames cannot be unwound
        return GGML_STATUS_ALLOC_FAILED;
    } catch (abi::__forced_unwind &) {
        throw; // Python ends a thread that asks for its lock while the process ends: only let it go
    } catch (...) {
        return GGML_STATUS_FAILED;
    }
}

} // namespace expertier
