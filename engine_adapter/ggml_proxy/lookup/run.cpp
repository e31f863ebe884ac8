#include "lookup/run.h"

#include "prefetch/run.h"
#include "backend/device.h"
#include "graph/expert_call.h"
#include "lookup/device_lookup.h"
#include "lookup/queue.h"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "residency/layer_lock.h"
#include "residency/errors.h"

#include <algorithm>
#include <numeric>
#include <thread>
#include <utility>

namespace expertier {

namespace {

// A graph runs so often without device look-ups first. By then every kernel is loaded and every CUDA or HIP graph is
// made: both may wait for the device, which would be waiting for the host.
constexpr int n_warm = 4;
constexpr int n_warm_captured = 1; // a segment of a captured graph has no CUDA graph of its own

constexpr int pause_graphs = 32; // after a fallback: the missing expert is on disk, and more may be

// The layers' locks are held from before the first look-up is queued until the last one is served, so that the tables
// on the device and the policy's tables agree.
class LookupRun {
  public:
    LookupRun(ProxyBackend & backend, ggml_cgraph * graph)
        : backend_(backend), plan_(backend.lookup_plan), tiers_(*plan_.tiers), lookup_(*tiers_.device_lookup()),
          queue_(backend, graph), reads_(tiers_.host_copies(), DeviceLookup::max_rows) {}

    // Nothing when it fell back: the graph's inputs are restored, as if nothing had been queued.
    std::optional<ggml_status> run() {
        for (std::vector<int32_t> * room : { &experts_, &slots_, &miss_index_, &filled_, &evicted_, &held_ }) {
            room->reserve(DeviceLookup::max_rows); // with look-ups queued, nothing may fail for want of memory
        }
        copies_.reserve(DeviceLookup::max_rows);
        backend_.deferred.reserve();
        queue_.look_at_layers(); // takes their locks
        for (int layer = 0; layer < tiers_.slots().n_layers(); layer++) {
            locks_.emplace_back(tiers_.tables().locks(), layer);
        }
        bring_tables();
        open_prefetch_run();
        if (!plan_.inputs.reserve(backend_.inner) || !queue_.find_lookups()) {
            return {};
        }
        lookup_.begin_graph();
        queue_.expect();

        tiers_.counters.graphs += 1;
        ggml_status status = GGML_STATUS_SUCCESS;
        if (!queue_.launch_captured()) {
            status = queue_.queue_all([this] { serve(false); });
        }
        while (n_served_ < queue_.layers().size()) { // also after a failure: no look-up may be left waiting
            serve(true);
        }
        if (prefetch_run_) {
            prefetch_run_->end();
        }
        if (status != GGML_STATUS_SUCCESS || falls_back_ || fails_) {
            ggml_backend_synchronize(backend_.inner);
            release_previous();
            if (fails_) {
                return GGML_STATUS_FAILED;
            }
            if (status == GGML_STATUS_SUCCESS) {
                tiers_.counters.device_lookup_fallbacks += 1;
            }
            plan_.pause = pause_graphs;
            plan_.inputs.restore(backend_.inner); // later nodes have taken their memory
            return {};                            // where the engine's backend failed, the next run shows that again
        }
        if (!held_.empty()) {
            backend_.deferred.add(
                PinnedSlots(tiers_.tables(), held_layer_, std::move(held_), PinnedSlots::Bytes::there));
        }
        return GGML_STATUS_SUCCESS;
    }

  private:
    // Uploads the tables of layers whose residency has changed since.
    void bring_tables() {
        bool uploads = false;
        for (size_t i = 0; i < plan_.calls.size(); i++) {
            const int layer = plan_.calls[i].layer;
            if (queue_.is_fully_resident(i) ||
                tiers_.tables().device_version(layer) ==
                    tiers_.tables().policy().version(tiers_.tables().directory(), layer)) {
                continue;
            }
            std::vector<int32_t> & table = lookup_.table(layer);
            std::vector<int32_t> all(table.size()), held;
            std::iota(all.begin(), all.end(), 0);
            tiers_.tables().policy().pin_ready(tiers_.tables().directory(), layer, all.data(), (int32_t) all.size(),
                                               table.data());
            std::copy_if(table.begin(), table.end(), std::back_inserter(held), [](int32_t slot) { return slot >= 0; });
            tiers_.tables().policy().release(tiers_.tables().directory(), layer, held.data(), (int32_t) held.size());
            lookup_.upload_table(layer);
            note_version(layer);
            uploads = true;
        }
        if (uploads) {
            ggml_backend_synchronize(lookup_.uploads());
        }
    }

    // Has the experts of later layers predicted and prefetched, unless that does not pay.
    void open_prefetch_run() {
        Predictor * predictor = tiers_.predictor();
        if (predictor == nullptr || !predictor->payoff.is_on()) {
            return;
        }
        predictor->distance.update();
        if (!plan_.rare_miss_layers_are_chosen) { // chosen only where the graph has to be captured anew anyway
            plan_.rare_miss_layers_are_chosen = true;
            std::vector<int64_t> expert_bytes;
            for (int layer = 0; layer < tiers_.slots().n_layers(); layer++) {
                expert_bytes.push_back(tiers_.slots().expert_bytes(layer));
            }
            predictor->rare_miss_layers.update(expert_bytes);
        }
        const size_t n_floats = queue_.n_predicted_floats();
        if (n_floats > 0 && predictor->reserve(n_floats)) {
            prefetch_run_.emplace(tiers_, lookup_, *predictor, tiers_.piece_events(), plan_.calls.size());
            queue_.predict(*prefetch_run_);
        }
    }

    // Serves look-ups in order, as far as they have arrived; waits for one if it `must`.
    void serve(bool must) {
        while (n_served_ < queue_.layers().size()) {
            const int layer = queue_.layers()[n_served_];
            if (prefetch_run_ && !must) {
                prefetch_run_->attend();
            }
            for (int i = 0; must && !lookup_.has_arrived(layer); i++) {
                if (prefetch_run_) {
                    prefetch_run_->attend();
                }
                if (i > 20'000) {
                    std::this_thread::yield();
                }
            }
            if (!lookup_.has_arrived(layer)) {
                return;
            }
            must = false;
            n_served_ += 1;
            release_previous(); // the kernels that read these slots were queued before this look-up
            const bool waits = lookup_.n_missing(layer) > 0;
            const bool go = !falls_back_ && !fails_ && serve(layer, waits);
            if (prefetch_run_ && (falls_back_ || fails_)) {
                prefetch_run_->stop();
            }
            if (waits && !lookup_.answer(layer, go) && go) {
                falls_back_ = true; // the device had given up waiting, and computes with other bytes
                tiers_.counters.device_lookups_late += 1;
                if (prefetch_run_) {
                    prefetch_run_->stop();
                }
            }
        }
    }

    bool serve(int layer, bool waits) {
        std::vector<int32_t> & experts = experts_;
        lookup_.experts(layer, experts);
        std::sort(experts.begin(), experts.end());
        experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
        const int32_t n = (int32_t) experts.size();
        std::vector<int32_t> & slots = slots_;
        slots.resize(n);
        miss_index_.resize(n);
        tiers_.counters.device_lookups += 1;
        tiers_.counters.device_lookup_waits += waits;
        tiers_.counters.lookups += 1;
        if (prefetch_run_) {
            prefetch_run_->arrive(layer, experts, waits);
        }
        const auto begin = [&] {
            return tiers_.tables().policy().begin(tiers_.tables().directory(), layer, experts.data(), n, slots.data(),
                                                  miss_index_.data());
        };
        int32_t n_misses = begin();
        if (n_misses == EXPERTIER_BUSY && prefetch_run_ && prefetch_run_->make_room(layer)) {
            n_misses = begin();
        }
        if (n_misses < 0) { // an id out of range, or slots that a lease holds: the run without look-ups says so
            falls_back_ = true;
            return false;
        }
        if (n_misses > 0 && !waits) {
            set_error("layer " + std::to_string(layer) +
                      ": the device's table of slots is not the policy's; restart, and "
                      "set MOE_DECODE_GATE=0 if it happens again");
            tiers_.tables().policy().abort(tiers_.tables().directory(), layer, slots.data(), n);
            fails_ = true;
            return false;
        }
        if (waits && !fill(layer, experts, slots, miss_index_, n_misses)) {
            // The victims are evicted; the layer's version says that the device's table is old.
            tiers_.tables().policy().abort(tiers_.tables().directory(), layer, slots.data(), n);
            falls_back_ = true;
            return false;
        }
        held_.swap(slots); // which is empty: the one before has been released
        held_layer_ = layer;
        return true;
    }

    // Copies the missing experts and the table to the device; false when the host pool lacks one of the experts.
    bool fill(int layer, const std::vector<int32_t> & experts, const std::vector<int32_t> & slots,
              const std::vector<int32_t> & miss_index, int32_t n_misses) {
        copies_.clear();
        for (int32_t i = 0; i < n_misses; i++) {
            const char * copy = reads_.take(layer, experts[miss_index[i]]);
            if (copy == nullptr) {
                reads_.release();
                return false;
            }
            copies_.push_back(copy);
        }
        std::vector<int32_t> & table = lookup_.table(layer);
        for (int32_t i = 0; i < n_misses; i++) {
            const int32_t slot = slots[miss_index[i]];
            for (const expertier_copy & piece : tiers_.slots().copies(layer)) {
                ggml_tensor target = tiers_.slots().piece(slot, piece);
                ggml_backend_tensor_set_async(lookup_.uploads(), &target, copies_[i] + piece.source, 0, piece.n_bytes);
            }
            std::replace(table.begin(), table.end(), slot, -1);
            table[experts[miss_index[i]]] = slot;
        }
        lookup_.upload_table(layer);
        ggml_backend_synchronize(lookup_.uploads());
        if (prefetch_run_) {
            prefetch_run_->synchronized();
        }
        if (n_misses > 0) {
            tiers_.note_missed(layer, n_misses);
            reads_.release();
            tiers_.tables().policy().complete(tiers_.tables().directory(), layer, slots.data(), (int32_t) slots.size());
            tiers_.counters.host_fills += n_misses;
            touch_evicted(layer, slots, miss_index, n_misses);
            note_version(layer);
        }
        return true;
    }

    void touch_evicted(int layer, const std::vector<int32_t> & slots, const std::vector<int32_t> & miss_index,
                       int32_t n_misses) {
        filled_.resize(n_misses);
        evicted_.resize(n_misses);
        for (int32_t i = 0; i < n_misses; i++) {
            filled_[i] = slots[miss_index[i]];
        }
        tiers_.tables().policy().evicted_by(tiers_.tables().directory(), layer, filled_.data(), n_misses,
                                            evicted_.data());
        tiers_.host_copies().touch(layer, evicted_);
    }

    void release_previous() {
        if (!held_.empty()) {
            tiers_.tables().policy().release(tiers_.tables().directory(), held_layer_, held_.data(),
                                             (int32_t) held_.size());
            held_.clear();
        }
    }

    void note_version(int layer) {
        tiers_.tables().device_version(layer) = tiers_.tables().policy().version(tiers_.tables().directory(), layer);
    }

    ProxyBackend & backend_;
    LookupPlan & plan_;
    Tiers & tiers_;
    DeviceLookup & lookup_;
    LookupQueue queue_;
    HostReads reads_;
    std::deque<LayerLock> locks_;
    std::vector<int32_t> experts_, slots_, miss_index_, filled_, evicted_; // of the look-up that is being served
    std::vector<const char *> copies_;
    size_t n_served_ = 0;
    std::optional<PrefetchRun> prefetch_run_;
    std::vector<int32_t> held_; // slots of the layer whose look-up was served last
    int held_layer_ = -1;
    bool falls_back_ = false, fails_ = false;
};

} // namespace

std::optional<ggml_status> try_device_lookup(ProxyBackend & backend, ggml_cgraph * graph) {
    LookupPlan & plan = backend.lookup_plan;
    look_at(plan, graph);
    if (plan.pause > 0) {
        plan.pause -= 1;
        return {};
    }
    if (!plan.is_fit || !plan.tiers->device_lookup() || backend.device->n_backends > 1 ||
        !plan.tiers->misses().serves_fills()) {
        return {};
    }
    const bool is_captured = LookupQueue::can_capture(plan);
    if (is_captured ? plan.n_of_uid <= n_warm_captured : plan.n_seen <= n_warm) {
        return {};
    }
    const auto is_fully_resident = [&plan](const LookupPlan::Call & call) {
        return plan.tiers->tables().is_fully_resident(call.layer);
    };
    if (std::all_of(plan.calls.begin(), plan.calls.end(), is_fully_resident)) {
        return {}; // there are no ids to look up: GraphRun queues all of it at once, too
    }
    const LookupExclusion::Running running(backend.device->lookup_exclusion);
    if (!running.may_run) {
        return {};
    }
    return LookupRun(backend, graph).run();
}

} // namespace expertier
