// Streams: a thread and a queue each. Work is done in the order in which it was queued, some time later; streams do
// not wait for one another, unless an event tells them to.
#pragma once

#include "driver/capture.h"
#include "driver/races.h"

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
    int32_t synchronize() const; // a code of capture.h, as of what follows
    bool is_done() const;        // what was recorded last; then the host knows of it
    bool is_captured() const;    // it was recorded last on a captured stream

  private:
    friend class Stream;
    void end_record(uint64_t number, const Clock & acquired);
    void wait(uint64_t number) const; // by whoever calls; a fault when that takes too long

    const int device_;
    uint64_t queued_ = 0, done_ = 0; // records
    Clock clock_;                    // what is done once the last one is
    Clock acquired_;                 // what the recording streams had learnt

    std::shared_ptr<Capture> capture_; // of the last record; null: it was none of a capture
    Capture::Record captured_{};
};

struct GraphExec;

class Stream {
  public:
    explicit Stream(int device, bool is_counted = true);
    ~Stream(); // does what is queued first
    Stream(const Stream &) = delete;
    Stream & operator=(const Stream &) = delete;

    void push(std::function<void()> work);
    // While the stream is captured, what is pushed, recorded and waited for is not done but kept for the graph. These
    // return codes of capture.h.
    int32_t record(const std::shared_ptr<Event> & event);
    int32_t wait(const std::shared_ptr<Event> & event);
    int32_t synchronize(); // returns once what was queued before is done

    int32_t begin_capture();
    int32_t end_capture(std::shared_ptr<const Graph> & out);
    int32_t launch(const std::shared_ptr<GraphExec> & exec);
    bool is_captured() const;
    int32_t capture_state() const; // what a call that pushes work returns now

    // Whether the calling thread has begun a capture on the device and not ended it.
    static bool captures_here(int device);

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
        Ticket ticket;
        std::function<void()> run;
    };
    void push_locked(std::function<void()> run);
    void record_locked(const std::shared_ptr<Event> & event);
    void wait_locked(const std::shared_ptr<Event> & event);
    void serve();

    std::deque<Work> queue_;
    uint64_t queued_ = 0, done_ = 0;
    bool quits_ = false;
    Clock clock_;           // what is done once all that is queued is
    Clock acquired_;        // what its work has learnt, for its thread alone
    Clock current_;         // what was done before the work that it does now, as the calls say; the same
    const uint64_t number_; // of all streams ever made, from 1 on
    const bool is_counted_;

    std::shared_ptr<Capture> capture_; // null: it is not captured
    size_t branch_ = 0;

    std::thread thread_;
};

// A ticket for something that the host does at once.
Ticket host_ticket();

// A graph that can be launched: each branch but the first has a stream of its own, so that nothing orders branches
// but the graph.
struct GraphExec {
    explicit GraphExec(std::shared_ptr<const Graph> graph);

    const std::shared_ptr<const Graph> graph;
    const std::vector<int> & devices;
    std::vector<std::unique_ptr<Stream>> branches; // without the first one
    std::shared_ptr<Event> launched;               // the last time: a graph does not run beside itself
};

// Have streams look again whether they are held.
void wake_streams();

} // namespace fake_gpu
