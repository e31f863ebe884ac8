#include "prefetch/run.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <thread>

namespace expertier {

namespace {

// A look-up that misses may have to wait for two pieces: 40 us on PCIe 5. With pieces of half the size, the host was too
// busy to keep the link fed.
constexpr size_t piece_bytes = 1 << 20;

} // namespace

using State = Prefetch::State;

PrefetchRun::PrefetchRun(Tiers & tiers, DeviceLookup & lookup, Predictor & predictor, const PieceEvents & events,
                         size_t n_calls)
    : tiers_(tiers), lookup_(lookup), predictor_(predictor), events_(events), evicted_(1) {
    predictions_.reserve(n_calls); // with look-ups queued, nothing may fail for want of memory
    wanted_.reserve(n_calls * Predictor::most_chosen);
    for (Prefetch & prefetch : prefetches_) {
        prefetch.reads = HostReads(tiers.host_copies(), 1);
    }
}

void PrefetchRun::expect(int layer, int n_rows) {
    Prediction prediction;
    prediction.layer = layer;
    prediction.n_rows = n_rows;
    const int n = tiers_.tables().policy().victims(tiers_.tables().directory(), layer, prediction.slots.data(),
                                                   Predictor::n_candidates, prediction.experts.data());
    predictor_.expect(layer, prediction.experts, std::max(n, 0)); // no candidate where leases hold all slots
    predictions_.push_back(prediction);
}

bool PrefetchRun::queue(const Router & from, const Router & to, int64_t n_used) {
    const int layer = predictions_[n_launched_].layer;
    if (!predictor_.queue(layer, from, to, n_used, tiers_.slots().expert_bytes(layer))) {
        return false;
    }
    n_launched_ += 1;
    return true;
}

void PrefetchRun::attend() {
    if (is_stopped_) {
        return;
    }
    read_predictions();
    const uint64_t before = n_done_;
    while (n_done_ < n_queued_ && lookup_.driver().event_query(events_[n_done_]->context) == 0) {
        n_done_ += 1;
    }
    if (n_done_ != before) {
        finish_complete();
    }
    while (n_queued_ - n_done_ < PieceEvents::n) {
        Prefetch * prefetch = next();
        if (prefetch == nullptr) {
            return;
        }
        queue_piece(*prefetch, true);
    }
}

void PrefetchRun::read_predictions() {
    for (; n_read_ < n_launched_ && predictor_.has_arrived(predictions_[n_read_].layer); n_read_++) {
        const Prediction & prediction = predictions_[n_read_];
        const int layer = prediction.layer;
        for (int i = 0; i < predictor_.n_chosen(layer); i++) {
            const int candidate = predictor_.candidate(layer, i);
            wanted_.push_back(
                { layer, predictor_.chosen(layer, i), prediction.slots[candidate], prediction.experts[candidate] });
        }
    }
}

// The prefetch whose next piece is to be queued; null when there is none.
Prefetch * PrefetchRun::next() {
    for (Prefetch & prefetch : prefetches_) {
        if (prefetch.state == State::Copying) {
            return &prefetch;
        }
    }
    while (!wanted_.empty()) {
        const Wanted wanted = wanted_.front();
        wanted_.erase(wanted_.begin());
        if (Prefetch * prefetch = begin(wanted)) {
            return prefetch;
        }
        restore(wanted);
    }
    return nullptr;
}

// Null when the host pool has no copy of the expert, or the slot cannot be had.
Prefetch * PrefetchRun::begin(const Wanted & wanted) {
    const int layer = wanted.layer;
    const auto free = std::find_if(prefetches_.begin(), prefetches_.end(),
                                   [](const Prefetch & prefetch) { return prefetch.state == State::Free; });
    if (free == prefetches_.end()) {
        return nullptr;
    }
    const char * copy = free->reads.take(layer, wanted.expert);
    if (copy == nullptr) {
        return nullptr;
    }
    if (tiers_.tables().policy().begin_prefetch_into(tiers_.tables().directory(), layer, wanted.expert, wanted.slot) <
        0) {
        free->reads.release();
        return nullptr;
    }
    note_version(layer);
    if (wanted.evicted >= 0) {
        lookup_.table(layer)[wanted.evicted] = -1; // as the kernel has done on the device
        evicted_[0] = wanted.evicted;
        tiers_.host_copies().touch(layer, evicted_);
    }
    free->state = State::Copying;
    free->layer = layer;
    free->expert = wanted.expert;
    free->slot = wanted.slot;
    free->copy = copy;
    free->piece = free->offset = 0;
    free->n_bytes = 0;
    free->last_piece = 0; // none is queued yet
    tiers_.counters.prefetches += 1;
    return &*free;
}

// Behind the last of an expert's bytes, its entry in the device's table is queued.
void PrefetchRun::queue_piece(Prefetch & prefetch, bool is_paced) {
    const std::vector<expertier_copy> & pieces = tiers_.slots().copies(prefetch.layer);
    expertier_copy piece = pieces[prefetch.piece];
    const char * source = prefetch.copy + piece.source + prefetch.offset;
    const size_t left = piece.n_bytes - prefetch.offset;
    const size_t n = is_paced ? std::min(left, piece_bytes) : left;
    piece.offset += prefetch.offset;
    piece.n_bytes = n;
    ggml_tensor target = tiers_.slots().piece(prefetch.slot, piece);
    ggml_backend_tensor_set_async(lookup_.uploads(), &target, source, 0, n);
    has_uploads_ = true;
    tiers_.counters.prefetch_bytes += n;
    prefetch.n_bytes += n;
    prefetch.offset = n < left ? prefetch.offset + n : 0;
    prefetch.piece += n == left;
    if (is_paced) {
        ggml_backend_event_record(events_[n_queued_], lookup_.uploads());
        n_queued_ += 1;
        prefetch.last_piece = n_queued_;
    } else {
        prefetch.last_piece.reset();
    }
    if (prefetch.piece == pieces.size()) {
        prefetch.state = State::Queued;
        lookup_.table(prefetch.layer)[prefetch.expert] = prefetch.slot;
        lookup_.upload_entry(prefetch.layer, prefetch.expert);
    }
}

void PrefetchRun::finish_complete() {
    for (Prefetch & prefetch : prefetches_) {
        if (!prefetch.is_complete(n_done_)) {
            continue;
        }
        switch (prefetch.state) {
        case State::Free:
        case State::Copying:
        case State::Landed:
            continue;
        case State::Queued:
            complete_fill(prefetch);
            prefetch.state = State::Landed;
            break;
        case State::Unwanted:
            complete_fill(prefetch);
            prefetch.state = State::Free;
            break;
        case State::Dropped:
            tiers_.tables().policy().abort(tiers_.tables().directory(), prefetch.layer, &prefetch.slot, 1);
            prefetch.state = State::Free;
            break;
        case State::Arriving:
            prefetch.state = State::Free;
            break;
        }
        note_version(prefetch.layer);
        prefetch.reads.release();
    }
}

// FILLING to READY, with nobody holding the slot.
void PrefetchRun::complete_fill(const Prefetch & prefetch) {
    tiers_.tables().policy().complete(tiers_.tables().directory(), prefetch.layer, &prefetch.slot, 1);
    tiers_.tables().policy().release(tiers_.tables().directory(), prefetch.layer, &prefetch.slot, 1);
}

void PrefetchRun::arrive(int layer, const std::vector<int32_t> & experts, bool waits) {
    if (n_ended_ == n_launched_ || predictions_[n_ended_].layer != layer) { // its experts were not predicted
        const std::vector<int32_t> & table = lookup_.table(layer);
        predictor_.rare_miss_layers.note(layer, std::count_if(experts.begin(), experts.end(), [&](int32_t expert) {
                                             return (size_t) expert < table.size() && table[expert] < 0;
                                         }));
        return;
    }
    while (n_read_ == n_ended_) { // the prediction ran before the look-up, on the same stream
        read_predictions();
    }
    count(predictions_[n_ended_], experts);
    n_ended_ += 1;
    while (!wanted_.empty() && wanted_.front().layer == layer) {
        if (!waits) { // else the answer uploads the whole table
            restore(wanted_.front());
        }
        wanted_.erase(wanted_.begin());
    }
    for (Prefetch & prefetch : prefetches_) {
        if (prefetch.layer == layer && prefetch.awaits_lookup()) {
            end_at_lookup(prefetch, std::binary_search(experts.begin(), experts.end(), prefetch.expert));
        }
    }
    finish_complete();
}

void PrefetchRun::end_at_lookup(Prefetch & prefetch, bool is_used) {
    const bool in_time = is_used && prefetch.state != State::Copying;
    tiers_.counters.prefetches_useful += is_used;
    tiers_.counters.prefetches_in_time += in_time;
    predictor_.distance.note(is_used, in_time);
    tiers_.counters.prefetch_wasted_bytes += is_used ? 0 : prefetch.n_bytes;
    if (!predictor_.payoff.note(is_used)) {
        tiers_.counters.prefetch_pauses += 1;
    }
    if (prefetch.state == State::Landed) {
        prefetch.state = State::Free;
        return;
    }
    if (!is_used) {
        prefetch.state = prefetch.state == State::Copying ? State::Dropped : State::Unwanted;
        return;
    }
    while (prefetch.state == State::Copying) {
        queue_piece(prefetch, false);
    }
    // No other reader sees the slot before the look-up has been answered, and the answer waits for the bytes.
    complete_fill(prefetch);
    note_version(prefetch.layer);
    prefetch.state = State::Arriving;
}

void PrefetchRun::synchronized() {
    has_uploads_ = false;
    n_done_ = n_queued_;
    for (Prefetch & prefetch : prefetches_) {
        prefetch.last_piece = prefetch.last_piece.value_or(n_done_);
    }
    finish_complete();
}

bool PrefetchRun::make_room(int layer) {
    const bool has_some = std::any_of(prefetches_.begin(), prefetches_.end(), [&](const Prefetch & prefetch) {
        return prefetch.layer == layer && prefetch.is_filling_at_device();
    });
    if (has_some) {
        ggml_backend_synchronize(lookup_.uploads());
        synchronized();
    }
    return has_some;
}

void PrefetchRun::stop() {
    if (is_stopped_) {
        return;
    }
    is_stopped_ = true;
    for (Prefetch & prefetch : prefetches_) {
        if (prefetch.awaits_lookup()) { // its look-up was not served
            tiers_.counters.prefetch_wasted_bytes += prefetch.n_bytes;
        }
        if (prefetch.state == State::Copying) {
            prefetch.state = State::Dropped;
        } else if (prefetch.state == State::Queued) {
            prefetch.state = State::Unwanted;
        } else if (prefetch.state == State::Landed) {
            prefetch.state = State::Free;
        }
    }
    if (has_uploads_) {
        ggml_backend_synchronize(lookup_.uploads());
    }
    synchronized();
}

void PrefetchRun::end() {
    stop();
    for (; n_ended_ < n_launched_; n_ended_++) { // their look-ups were not served
        const int layer = predictions_[n_ended_].layer;
        while (!predictor_.has_arrived(layer)) {
            std::this_thread::yield();
        }
        tiers_.tables().device_version(layer) = -1;
    }
}

// The kernel has taken an expert out of the device's table that keeps its slot after all: puts it back.
void PrefetchRun::restore(const Wanted & wanted) {
    if (wanted.evicted >= 0) {
        lookup_.upload_entry(wanted.layer, wanted.evicted);
        has_uploads_ = true;
    }
}

void PrefetchRun::count(const Prediction & prediction, const std::vector<int32_t> & experts) {
    const int32_t * first = predictor_.predicted(prediction.layer);
    const std::vector<int32_t> & table = lookup_.table(prediction.layer);
    int64_t n_missing = 0;
    for (int32_t expert : experts) {
        if (expert < 0 || (size_t) expert >= table.size()) {
            continue; // the policy reports an id out of range
        }
        const bool is_right = std::find(first, first + prediction.n_rows, expert) != first + prediction.n_rows;
        const bool was_missing = table[expert] < 0 || std::any_of(
                                                          prefetches_.begin(), prefetches_.end(),
                                                          [&](const Prefetch & prefetch) {
                                                              return prefetch.awaits_lookup() &&
                                                                     prefetch.layer == prediction.layer &&
                                                                     prefetch.expert == expert;
                                                          });
        tiers_.counters.predicted += 1;
        tiers_.counters.predicted_right += is_right;
        tiers_.counters.missing += was_missing;
        n_missing += was_missing;
        tiers_.counters.missing_predicted += was_missing && is_right;
    }
    predictor_.rare_miss_layers.note(prediction.layer, n_missing);
}

void PrefetchRun::note_version(int layer) {
    tiers_.tables().device_version(layer) = tiers_.tables().policy().version(tiers_.tables().directory(), layer);
}

} // namespace expertier
