#include "driver/stream.h"

#include "driver/state.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

namespace fake_gpu {

namespace {

constexpr auto wait_limit = std::chrono::seconds(60); // for an event that nobody is going to complete

std::mutex mutex; // guards all queues and events
std::condition_variable changed;
std::vector<Stream *> streams;
uint64_t n_streams = 0;
Clock host_clock;                               // what the host has waited for, or done itself
std::vector<std::shared_ptr<Capture>> captures; // that have not ended

thread_local Stream * serving = nullptr; // the stream whose thread this is

uint64_t mix(uint64_t x) { // splitmix64
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

void jitter(uint64_t stream, uint64_t work) {
    if (const uint64_t limit = (uint64_t) switches.jitter_us) {
        const uint64_t random = mix((uint64_t) switches.seed ^ mix(stream << 32 ^ work));
        std::this_thread::sleep_for(std::chrono::microseconds(random % (limit + 1)));
    }
}

} // namespace

void Event::end_record(uint64_t number, const Clock & acquired) {
    std::lock_guard<std::mutex> lock(mutex);
    done_ = std::max(done_, number);
    join(acquired_, acquired);
    changed.notify_all();
}

void Event::wait(uint64_t number) const {
    std::unique_lock<std::mutex> lock(mutex);
    if (!changed.wait_for(lock, wait_limit, [&] { return done_ >= number; })) {
        fault(device_, "an event was waited for that is not recorded in time");
    }
}

int32_t Event::synchronize() const {
    std::unique_lock<std::mutex> lock(mutex);
    if (capture_) {
        return capture_->has_ended ? CAPTURED_EVENT : capture_->spoil(CAPTURED_EVENT);
    }
    const uint64_t number = queued_;
    const Clock clock = clock_;
    lock.unlock();
    wait(number);
    lock.lock();
    join(host_clock, clock);
    join(host_clock, acquired_);
    return CAPTURE_OK;
}

bool Event::is_done() const {
    std::lock_guard<std::mutex> lock(mutex);
    if (done_ < queued_) {
        return false;
    }
    join(host_clock, clock_);
    join(host_clock, acquired_);
    return true;
}

bool Event::is_captured() const {
    std::lock_guard<std::mutex> lock(mutex);
    return capture_ != nullptr;
}

Stream::Stream(int on_device, bool is_counted)
    : device(on_device), number_([] {
          std::lock_guard<std::mutex> lock(mutex);
          return ++n_streams;
      }()),
      is_counted_(is_counted) {
    std::lock_guard<std::mutex> lock(mutex);
    streams.push_back(this);
    thread_ = std::thread([this] { serve(); });
    counters[device].live_streams += is_counted_;
}

Stream::~Stream() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (capture_) {
            capture_->lose(*this);
        }
        quits_ = true;
        changed.notify_all();
    }
    thread_.join();
    std::lock_guard<std::mutex> lock(mutex);
    streams.erase(std::find(streams.begin(), streams.end(), this));
    join(host_clock, clock_);
    host_clock.erase(number_);
    forget_stream(number_);
    counters[device].live_streams -= is_counted_;
}

void Stream::push_locked(std::function<void()> run) {
    join(clock_, host_clock);
    const auto before = std::make_shared<const Clock>(clock_);
    queued_ += 1;
    clock_[number_] = queued_;
    queue_.push_back({ { number_, queued_, before, &acquired_ }, std::move(run) });
    changed.notify_all();
}

void Stream::push(std::function<void()> run) {
    const auto call = driver_call();
    std::lock_guard<std::mutex> lock(mutex);
    if (capture_) {
        check_captured(device, capture_->add(branch_, std::move(run)), "work on a captured stream");
        return;
    }
    push_locked(std::move(run));
}

int32_t Stream::record(const std::shared_ptr<Event> & event) {
    const auto call = driver_call();
    std::lock_guard<std::mutex> lock(mutex);
    if (capture_) {
        event->capture_ = capture_;
        return capture_->record(branch_, event->captured_);
    }
    record_locked(event);
    return CAPTURE_OK;
}

void Stream::record_locked(const std::shared_ptr<Event> & event) {
    event->capture_ = nullptr;
    const uint64_t number = ++event->queued_;
    push_locked([this, event, number] { event->end_record(number, acquired_); });
    event->clock_ = clock_;
}

int32_t Stream::wait(const std::shared_ptr<Event> & event) {
    const auto call = driver_call();
    std::lock_guard<std::mutex> lock(mutex);
    const bool is_outside = !event->capture_ || event->capture_->has_ended;
    if (capture_ && is_outside) {
        return capture_->spoil(CAPTURE_ISOLATION);
    }
    if (capture_ && capture_ != event->capture_) {
        event->capture_->spoil(CAPTURE_MERGE);
        return capture_->spoil(CAPTURE_MERGE);
    }
    if (event->capture_) {
        if (event->capture_->has_ended) {
            return CAPTURED_EVENT;
        }
        if (!capture_) {
            if (const int32_t code = event->capture_->state()) {
                return code;
            }
            capture_ = event->capture_;
            branch_ = capture_->join(*this);
        }
        return capture_->wait(branch_, event->captured_);
    }
    wait_locked(event);
    return CAPTURE_OK;
}

void Stream::wait_locked(const std::shared_ptr<Event> & event) {
    join(clock_, event->clock_);
    push_locked([this, event, number = event->queued_] {
        event->wait(number);
        std::lock_guard<std::mutex> relock(mutex);
        join(acquired_, event->acquired_);
    });
}

int32_t Stream::synchronize() {
    std::unique_lock<std::mutex> lock(mutex);
    if (capture_) {
        return capture_->spoil(CAPTURE_UNSUPPORTED);
    }
    const uint64_t until = queued_;
    const Clock clock = clock_;
    changed.wait(lock, [&] { return done_ >= until; });
    join(host_clock, clock);
    return CAPTURE_OK;
}

int32_t Stream::begin_capture() {
    std::lock_guard<std::mutex> lock(mutex);
    if (capture_) {
        return capture_->spoil(CAPTURE_ILLEGAL_STATE);
    }
    capture_ = std::make_shared<Capture>(*this);
    branch_ = 0;
    captures.push_back(capture_);
    counters[device].captures += 1;
    return CAPTURE_OK;
}

int32_t Stream::end_capture(std::shared_ptr<const Graph> & out) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!capture_) {
        return CAPTURE_ILLEGAL_STATE;
    }
    if (branch_ != 0) {
        return capture_->spoil(CAPTURE_UNMATCHED);
    }
    const auto capture = capture_;
    const int32_t code = capture->end();
    for (Stream * stream : capture->streams()) {
        if (stream) {
            stream->capture_ = nullptr;
        }
    }
    captures.erase(std::find(captures.begin(), captures.end(), capture));
    if (code == CAPTURE_OK) {
        out = capture->graph();
    }
    return code;
}

bool Stream::is_captured() const {
    std::lock_guard<std::mutex> lock(mutex);
    return capture_ != nullptr;
}

int32_t Stream::capture_state() const {
    std::lock_guard<std::mutex> lock(mutex);
    return capture_ ? capture_->state() : (int32_t) CAPTURE_OK;
}

bool Stream::captures_here(int device) {
    std::lock_guard<std::mutex> lock(mutex);
    return std::any_of(captures.begin(), captures.end(), [&](const auto & capture) {
        return capture->graph()->devices[0] == device && capture->thread == std::this_thread::get_id();
    });
}

GraphExec::GraphExec(std::shared_ptr<const Graph> of)
    : graph(std::move(of)), devices(graph->devices), launched(std::make_shared<Event>(devices[0])) {
    for (size_t branch = 1; branch < devices.size(); branch++) {
        branches.push_back(std::make_unique<Stream>(devices[branch], false));
    }
}

int32_t Stream::launch(const std::shared_ptr<GraphExec> & exec) {
    const auto call = driver_call();
    std::lock_guard<std::mutex> lock(mutex);
    if (capture_) {
        return capture_->spoil(CAPTURE_NOT_SUPPORTED);
    }
    wait_locked(exec->launched);
    std::vector<std::shared_ptr<Event>> events(exec->graph->n_records);
    for (const Graph::Piece & piece : exec->graph->pieces) {
        Stream & stream = piece.branch ? *exec->branches[piece.branch - 1] : *this;
        switch (piece.kind) {
        case Graph::Piece::work:
            stream.push_locked(piece.run);
            break;
        case Graph::Piece::record:
            events[piece.number] = std::make_shared<Event>(stream.device);
            stream.record_locked(events[piece.number]);
            break;
        case Graph::Piece::wait:
            stream.wait_locked(events[piece.number]);
            break;
        }
    }
    record_locked(exec->launched);
    push_locked([exec] {}); // it may be destroyed meanwhile
    counters[device].graph_launches += 1;
    return CAPTURE_OK;
}

void Stream::serve() {
    serving = this;
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
        changed.wait(lock, [&] { return queue_.empty() ? quits_ : !switches.held; });
        if (queue_.empty()) {
            return;
        }
        {
            const Work work = std::move(queue_.front());
            queue_.pop_front();
            lock.unlock();
            jitter(number_, work.ticket.number);
            const Doing doing(work.ticket);
            current_ = *work.ticket.before;
            work.run();
        } // what it holds goes before anyone is told that it is done
        lock.lock();
        done_ += 1;
        changed.notify_all();
    }
}

void Stream::synchronize_all() {
    std::unique_lock<std::mutex> lock(mutex);
    Clock until; // streams may come and go meanwhile
    Clock clock;
    for (const Stream * stream : streams) {
        until[stream->number_] = stream->queued_;
        join(clock, stream->clock_);
    }
    changed.wait(lock, [&] {
        return std::all_of(streams.begin(), streams.end(), [&](const Stream * stream) {
            const auto found = until.find(stream->number_);
            return found == until.end() || stream->done_ >= found->second;
        });
    });
    join(host_clock, clock);
}

void Stream::tell_host() {
    std::lock_guard<std::mutex> lock(mutex);
    const Stream & at = serving ? *serving : *this; // which is another one when a graph was launched there
    join(host_clock, at.current_);
    join(host_clock, at.acquired_);
}

void Stream::acquire_host() {
    std::lock_guard<std::mutex> lock(mutex);
    join((serving ? serving : this)->acquired_, host_clock);
}

void Stream::acquire(const Clock & clock) {
    std::lock_guard<std::mutex> lock(mutex);
    join((serving ? serving : this)->acquired_, clock);
}

Ticket host_ticket() {
    std::lock_guard<std::mutex> lock(mutex);
    const auto before = std::make_shared<const Clock>(host_clock);
    return { 0, ++host_clock[0], before, nullptr };
}

void wake_streams() {
    std::lock_guard<std::mutex> lock(mutex);
    changed.notify_all();
}

} // namespace fake_gpu
