#include "slab/compute_region.h"

#include "backend/backend.h"
#include "backend/device.h"
#include "slab/queued_moves.h"
#include "residency/tiers.h"

#include <algorithm>
#include <chrono>

namespace expertier {

namespace {

// A graph's need grows a little with the length of its context. So that the boundary does not move each time, a need is
// rounded up to one of this many steps of its buffer.
constexpr size_t n_steps = 16;

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

} // namespace

ComputeRegion::ComputeRegion(const expertier_compute & compute, Tiers & tiers, ProxyDevice & device,
                             ggml_backend_buffer_t slab, size_t alignment)
    : compute_(compute), tiers_(tiers), device_(device), slab_(slab),
      base_(static_cast<char *>(ggml_backend_buffer_get_base(slab))), alignment_(alignment),
      boundary_(compute.compute_bytes) {}

ComputeRegion::Place * ComputeRegion::allocate(size_t size) {
    std::lock_guard<std::mutex> guard(mutex_);
    const size_t rounded = round_up(size, alignment_);
    size_t offset = 0;
    auto after = places_.begin();
    while (after != places_.end() && after->offset - offset < rounded) {
        offset = after->offset + after->size;
        ++after;
    }
    if (closed_ || offset + rounded > compute_.most_bytes) {
        return nullptr;
    }
    Place place;
    place.offset = offset;
    place.size = rounded;
    return &*places_.insert(after, std::move(place));
}

void ComputeRegion::free(Place * place) {
    std::lock_guard<std::mutex> guard(mutex_);
    places_.remove_if([place](const Place & one) { return &one == place; });
}

void * ComputeRegion::base(const Place & place) const { return base_ + place.offset; }

void ComputeRegion::begin_placing(Place & place) {
    std::lock_guard<std::mutex> guard(mutex_);
    place.need = 0;
    place.holds = false; // the old graph may still run, but a move of the slots first waits for queued work
    place.failure.clear();
}

void ComputeRegion::need(Place & place, size_t end) {
    std::lock_guard<std::mutex> guard(mutex_);
    place.need = std::max(place.need, std::min(end, place.size));
}

bool ComputeRegion::make_room(Place & place) {
    {
        std::lock_guard<std::mutex> guard(mutex_);
        if (take_hold(place)) {
            return true;
        }
        if (!place.failure.empty()) { // the slots are asked to leave once for each graph
            return false;
        }
    }
    drain_backends(device_); // releases deferred slots, for which a running graph may be waiting
    RunLock::Alone alone(device_.runs);
    size_t wanted = 0;
    {
        std::lock_guard<std::mutex> guard(mutex_);
        if (take_hold(place)) {
            return true;
        }
        wanted = std::max(std::max(total(), end_of(place)), boundary_);
    }
    std::string failure;
    const bool moved = move(wanted, failure);
    std::lock_guard<std::mutex> guard(mutex_);
    if (take_hold(place)) { // the move may have succeeded in spite of an error: an interrupt at its very end
        counts_.moves_up += moved;
        return true;
    }
    place.failure = failure;
    return false;
}

bool ComputeRegion::take_failure(Place & place, std::string & failure) {
    std::lock_guard<std::mutex> guard(mutex_);
    failure.clear();
    failure.swap(place.failure);
    return !failure.empty();
}

void ComputeRegion::lower_boundary() {
    const auto pays = [this] {
        const size_t lowest = total();
        if (lowest >= boundary_) {
            missed_ = 0;
            return false;
        }
        return missed_ >= (int64_t) (boundary_ - lowest) + compute_.move_cost_bytes;
    };
    {
        std::lock_guard<std::mutex> guard(mutex_);
        if (total() < boundary_) {
            missed_ += compute_.cut_cost_bytes;
        }
        if (closed_ || !pays()) {
            return;
        }
    }
    drain_backends(device_);
    RunLock::Alone alone(device_.runs);
    size_t lowest = 0;
    {
        std::lock_guard<std::mutex> guard(mutex_);
        if (!pays()) {
            return;
        }
        lowest = total();
        boundary_ = lowest;
    }
    std::string failure; // not reported: the boundary stays where it is, and later misses try again
    const bool moved = move(lowest, failure);
    std::lock_guard<std::mutex> guard(mutex_);
    counts_.moves_down += moved;
}

void ComputeRegion::note_missed(int64_t n_bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    missed_ += n_bytes;
}

void ComputeRegion::follow_demand() {
    {
        std::lock_guard<std::mutex> guard(mutex_);
        if (closed_ || compute_.look == nullptr || ++n_graphs_ < compute_.look_graphs) {
            return;
        }
        n_graphs_ = 0;
    }
    if (!tiers_.wants_other_slots(compute_)) {
        return;
    }
    drain_backends(device_);
    RunLock::Alone alone(device_.runs);
    size_t boundary = 0;
    int64_t missed = 0;
    {
        std::lock_guard<std::mutex> guard(mutex_);
        boundary = boundary_;
        missed = missed_;
    }
    std::string failure; // not reported: the slots stay as they are, and a later look tries again
    const bool moved = move(boundary, failure);
    std::lock_guard<std::mutex> guard(mutex_);
    missed_ = missed;
    counts_.quota_moves += moved;
}

void ComputeRegion::close() {
    std::lock_guard<std::mutex> guard(mutex_);
    closed_ = true;
}

expertier_compute_counts ComputeRegion::counts() {
    std::lock_guard<std::mutex> guard(mutex_);
    expertier_compute_counts now = counts_;
    if (const auto moves = find_moves_of(slab_)) {
        const QueuedMoves::Counts device = moves->counts();
        now.queue_ns = device.queue_ns;
        now.wait_ns = device.wait_ns;
        now.copies = device.copies;
    }
    now.boundary_bytes = (int64_t) boundary_;
    now.needed_bytes = (int64_t) total();
    now.buffers = (int64_t) places_.size();
    for (const Place & place : places_) {
        now.buffer_bytes += (int64_t) place.size;
    }
    return now;
}

// Whether the boundary is above the place's need. The need counts from then on. Both happen under one lock, so that a
// thread that lowers the boundary sees the need.
bool ComputeRegion::take_hold(Place & place) {
    place.holds = end_of(place) <= boundary_;
    return place.holds;
}

size_t ComputeRegion::end_of(const Place & place) const {
    if (place.need == 0) {
        return 0;
    }
    const size_t step = round_up(std::max<size_t>(place.size / n_steps, 1), alignment_);
    return place.offset + std::min(round_up(place.need, step), place.size);
}

size_t ComputeRegion::total() const {
    size_t end = 0;
    for (const Place & place : places_) {
        end = std::max(end, place.holds ? end_of(place) : 0);
    }
    return end;
}

// With no graph running. When Python's part fails, the slots stay where they are, but some experts may have been lost.
bool ComputeRegion::move(size_t n_bytes, std::string & failure) {
    const int64_t begin = now_ns();
    drain_backends(device_);
    const int64_t drained = now_ns();
    const bool moved = tiers_.move(compute_, n_bytes, failure);
    const int64_t end = now_ns();
    std::lock_guard<std::mutex> guard(mutex_);
    boundary_ = compute_.compute_bytes;
    missed_ = 0;
    counts_.move_ns += end - drained;
    counts_.drain_ns += drained - begin;
    counts_.failed_moves += !moved;
    return moved;
}

} // namespace expertier
