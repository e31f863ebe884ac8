#include "lookup/queue.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <tuple>

namespace expertier {

LookupQueue::LookupQueue(ProxyBackend & backend, ggml_cgraph * graph)
    : backend_(backend), graph_(graph), plan_(backend.lookup_plan), tiers_(*plan_.tiers),
      lookup_(*tiers_.device_lookup()), segments_(backend, graph) {
    steps_.reserve(plan_.calls.size()); // with look-ups queued, nothing may fail for want of memory
    queued_.reserve(plan_.calls.size());
}

LookupQueue::~LookupQueue() { tiers_.counters.segments += segments_.n_segments(); }

bool LookupQueue::can_capture(const LookupPlan & plan) {
    return plan.tiers->device_lookup()->driver().capture_begin && plan.may_be_captured && !plan.cannot_be_captured;
}

void LookupQueue::look_at_layers() {
    for (const LookupPlan::Call & call : plan_.calls) {
        is_fully_resident_.push_back(tiers_.tables().is_fully_resident(call.layer));
    }
}

size_t LookupQueue::n_predicted_floats() const {
    size_t n_floats = 0;
    for (size_t i = 0; i < plan_.calls.size(); i++) {
        const auto [first, last] = predicted_by(i);
        for (size_t next = first; next <= last; next++) {
            if (can_predict(i, next)) {
                n_floats = std::max<size_t>(n_floats, ggml_nelements(plan_.calls[i].router.input));
            }
        }
    }
    return n_floats;
}

ggml_status LookupQueue::queue_all(const std::function<void()> & after_lookup) {
    return queue_all(segments_, after_lookup);
}

std::pair<size_t, size_t> LookupQueue::predicted_by(size_t i) const {
    const size_t last = i + tiers_.predictor()->layers_ahead();
    return { i == 0 ? 1 : last, std::min(last, plan_.calls.size() - 1) };
}

bool LookupQueue::can_predict(size_t from, size_t to) const {
    if (is_fully_resident_[from] || is_fully_resident_[to]) {
        return false;
    }
    const LookupPlan::Call & call = plan_.calls[from];
    const LookupPlan::Call & next = plan_.calls[to];
    const int n = tiers_.slots().n_slots(next.layer);
    return !tiers_.predictor()->rare_miss_layers.has(next.layer) && n < tiers_.slots().n_experts(next.layer) &&
           n > next.n_used * next.n_tokens && call.n_tokens == next.n_tokens &&
           Predictor::can(call.router, next.router, next.n_used, next.n_tokens);
}

bool LookupQueue::find_lookups() {
    for (size_t i = 0; i < plan_.calls.size(); i++) {
        const LookupPlan::Call & call = plan_.calls[i];
        if (is_fully_resident_[i]) {
            continue;
        }
        Step step;
        step.call = i;
        step.ids = graph_->nodes[call.first]->src[2];
        step.slot_ids = backend_.ids[tiers_.slots().of({ call.layer, 0 })].reserve(backend_.inner, step.ids->ne[0],
                                                                                   step.ids->ne[1]);
        if (step.slot_ids == nullptr) {
            return false;
        }
        if (prefetch_run_ != nullptr) {
            std::tie(step.next, step.last) = predicted_by(i);
            while (step.next <= step.last && !can_predict(i, step.next)) {
                step.next += 1;
            }
            if (step.next <= step.last) {
                step.saved = tiers_.predictor()->rows_to_save(call.router, plan_.calls[step.next].router);
            }
        }
        steps_.push_back(step);
    }
    return true;
}

bool LookupQueue::predicts(const Step & step, size_t to) const {
    const LookupPlan::Call & call = plan_.calls[step.call];
    return can_predict(step.call, to) &&
           tiers_.predictor()->rows_to_save(call.router, plan_.calls[to].router).rows == step.saved.rows;
}

void LookupQueue::expect() {
    tiers_.counters.fully_resident_calls += plan_.calls.size() - steps_.size();
    for (const Step & step : steps_) {
        const LookupPlan::Call & call = plan_.calls[step.call];
        lookup_.expect(call.layer, (uint32_t) (call.n_used * call.n_tokens));
        for (size_t next = step.next; next <= step.last; next++) {
            if (predicts(step, next)) {
                prefetch_run_->expect(plan_.calls[next].layer,
                                      (int) (plan_.calls[next].n_used * plan_.calls[next].n_tokens));
            }
        }
    }
}

bool LookupQueue::launch_captured() {
    if (!can_capture(plan_)) {
        return false;
    }
    const uint64_t key = key_of_all();
    if (!backend_.captured.is(key)) {
        const auto queue = [this] {
            GraphSegments segments(backend_, graph_);
            segments.run_afresh(backend_.leading);
            return queue_all(segments, [] {}) == GGML_STATUS_SUCCESS;
        };
        const bool done = backend_.captured.capture(lookup_, backend_.inner, key, queue);
        queued_.clear(); // nothing was
        if (prefetch_run_ != nullptr) {
            prefetch_run_->launched(false);
        }
        if (!done) {
            plan_.cannot_be_captured = true;
            GGML_LOG_WARN("expertier: a decode graph could not be captured; this context queues its parts one by one, "
                          "which is slower (MOE_DECODE_CAPTURE=0 has none captured)\n");
            return false;
        }
        tiers_.counters.captures += 1;
    }
    if (!backend_.captured.launch(lookup_, backend_.inner)) {
        return false;
    }
    tiers_.counters.captured_runs += 1;
    for (const Step & step : steps_) {
        queued_.push_back(plan_.calls[step.call].layer);
    }
    if (prefetch_run_ != nullptr) {
        prefetch_run_->launched(true);
    }
    return true;
}

uint64_t LookupQueue::key_of_all() const {
    const auto address = [](const void * at) { return (uint64_t) reinterpret_cast<uintptr_t>(at); };
    uint64_t key = mixed(mixed(plan_.uid, (uint64_t) plan_.epoch), address(&lookup_));
    for (const LookupPlan::Node & at : plan_.nodes) {
        const ggml_tensor * pool = tiers_.slots().of({ at.layer, at.matrix });
        key = mixed(mixed(key, address(pool->data)), (uint64_t) pool->ne[2]);
    }
    for (const Step & step : steps_) {
        key = mixed(mixed(key, step.call), address(step.slot_ids->data));
        key = mixed(mixed(key, address(step.saved.copy)), step.next <= step.last ? step.next * 4096 + step.last : 0);
    }
    for (const CopyRow & row : plan_.inputs.rows()) {
        key = mixed(key, row.target);
    }
    return key;
}

bool LookupQueue::queue_lookup(const Step & step) {
    const LookupPlan::Call & call = plan_.calls[step.call];
    if (!lookup_.queue(backend_.inner, call.layer, step.ids, step.slot_ids, step.saved)) {
        return false;
    }
    queued_.push_back(call.layer);
    for (size_t next = step.next; next <= step.last; next++) {
        const LookupPlan::Call & to = plan_.calls[next];
        if (predicts(step, next) && !prefetch_run_->queue(call.router, to.router, to.n_used)) {
            return false;
        }
    }
    return true;
}

ggml_status LookupQueue::queue_all(GraphSegments & segments, const std::function<void()> & after_lookup) {
    if (!lookup_.send_launch_params(backend_.inner, plan_.inputs.rows())) {
        return GGML_STATUS_FAILED;
    }
    int last = -1;
    size_t n_done = 0; // steps
    for (const LookupPlan::Node & at : plan_.nodes) {
        ggml_tensor * node = graph_->nodes[at.index];
        const LookupPlan::Call & call = plan_.calls[at.call];
        ggml_tensor * pool = tiers_.slots().of({ at.layer, at.matrix });
        if (is_fully_resident_[at.call]) {
            segments.redirect(node, pool, node->src[2]);
            continue;
        }
        if (at.call != last) {
            last = at.call;
            n_done += 1;
            if (ggml_status status = segments.run_until(call.first)) {
                return status;
            }
            if (!queue_lookup(steps_[n_done - 1])) {
                return GGML_STATUS_FAILED;
            }
            after_lookup();
        }
        segments.redirect(node, pool, steps_[n_done - 1].slot_ids);
    }
    return segments.run_until(graph_->n_nodes);
}

} // namespace expertier
