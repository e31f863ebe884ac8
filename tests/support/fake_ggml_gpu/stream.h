// Streams: a thread and a queue each. Work is done in the order in which it was queued, some time later; streams do
// not wait for one another, unless an event tells them to.
#pragma once

#include "races.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

namespace fake_gpu {

// As on a device: a wait is for the record that was queued last when the wait was queued; none means no wait.
class Event {
  public:
    explicit Event(int device) : device_(device) {}
    void synchronize() const;
    bool is_done() const; // what was recorded last; then the host knows of it

  private:
    friend class Stream;
    void end_record(uint64_t number, const Clock & acquired);
    void wait(uint64_t number) const; // by whoever calls; a fault when that takes too long

    const int device_;
    uint64_t  queued_ = 0, done_ = 0; // records
    Clock     clock_;                 // what is done once the last one is
    Clock     acquired_;              // what the recording streams had learnt
};

class Stream {
  public:
    explicit Stream(int device);
    ~Stream(); // does what is queued first
    Stream(const Stream &) = delete;
    Stream & operator=(const Stream &) = delete;

    void push(std::function<void()> work);
    void record(std::shared_ptr<Event> event);
    void wait(std::shared_ptr<Event> event);
    void synchronize(); // returns once what was queued before is done

    // The same for all streams there are: as freeing device memory does.
    static void synchronize_all();

    // For its own work: the host hears from it now, and so that all is done which came before it.
    void tell_host();
    // The other way: it has heard from the host, and so of all that the host has waited for.
    void acquire_host();
    // The same from work on another stream.
    void acquire(const Clock & clock);

    const int device;

  private:
    struct Work {
        Ticket                ticket;
        std::function<void()> run;
    };
    void push_locked(std::function<void()> run);
    void serve();

    std::deque<Work> queue_;
    uint64_t         queued_ = 0, done_ = 0;
    bool             quits_  = false;
    Clock            clock_;    // what is done once all that is queued is
    Clock            acquired_; // what its work has learnt, for its thread alone
    Clock            current_;  // what was done before the work that it does now, as the calls say; the same
    const uint64_t   number_; // of all streams ever made, from 1 on
    std::thread      thread_;
};

// A ticket for something that the host does at once.
Ticket host_ticket();

// Have streams look again whether they are held.
void wake_streams();

} // namespace fake_gpu
