#include "stream.h"

#include "state.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

namespace fake_gpu {

namespace {

constexpr auto wait_limit = std::chrono::seconds(60); // for an event that nobody is going to complete

std::mutex              mutex; // guards all queues and events
std::condition_variable changed;
std::vector<Stream *>   streams;
uint64_t                n_streams = 0;
Clock                   host_clock; // what the host has waited for, or done itself

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

void Event::synchronize() const {
    std::unique_lock<std::mutex> lock(mutex);
    const uint64_t               number = queued_;
    const Clock                  clock  = clock_;
    lock.unlock();
    wait(number);
    lock.lock();
    join(host_clock, clock);
    join(host_clock, acquired_);
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

Stream::Stream(int on_device) : device(on_device), number_([] {
    std::lock_guard<std::mutex> lock(mutex);
    return ++n_streams;
}()) {
    std::lock_guard<std::mutex> lock(mutex);
    streams.push_back(this);
    thread_ = std::thread([this] { serve(); });
    counters[device].live_streams += 1;
}

Stream::~Stream() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        quits_ = true;
        changed.notify_all();
    }
    thread_.join();
    std::lock_guard<std::mutex> lock(mutex);
    streams.erase(std::find(streams.begin(), streams.end(), this));
    join(host_clock, clock_);
    host_clock.erase(number_);
    forget_stream(number_);
    counters[device].live_streams -= 1;
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
    push_locked(std::move(run));
}

void Stream::record(std::shared_ptr<Event> event) {
    const auto call = driver_call();
    std::lock_guard<std::mutex> lock(mutex);
    const uint64_t              number = ++event->queued_;
    push_locked([this, event, number] { event->end_record(number, acquired_); });
    event->clock_ = clock_;
}

void Stream::wait(std::shared_ptr<Event> event) {
    const auto call = driver_call();
    std::lock_guard<std::mutex> lock(mutex);
    join(clock_, event->clock_);
    push_locked([this, event, number = event->queued_] {
        event->wait(number);
        std::lock_guard<std::mutex> relock(mutex);
        join(acquired_, event->acquired_);
    });
}

void Stream::synchronize() {
    std::unique_lock<std::mutex> lock(mutex);
    const uint64_t               until = queued_;
    const Clock                  clock = clock_;
    changed.wait(lock, [&] { return done_ >= until; });
    join(host_clock, clock);
}

void Stream::serve() {
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
    join(host_clock, current_);
    join(host_clock, acquired_);
}

void Stream::acquire_host() {
    std::lock_guard<std::mutex> lock(mutex);
    join(acquired_, host_clock);
}

void Stream::acquire(const Clock & clock) {
    std::lock_guard<std::mutex> lock(mutex);
    join(acquired_, clock);
}

Ticket host_ticket() {
    std::lock_guard<std::mutex> lock(mutex);
    const auto                  before = std::make_shared<const Clock>(host_clock);
    return { 0, ++host_clock[0], before, nullptr };
}

void wake_streams() {
    std::lock_guard<std::mutex> lock(mutex);
    changed.notify_all();
}

} // namespace fake_gpu
