// Finds work that touches the same device memory on two streams, or on a stream and the host, though nobody ordered
// it: whichever came first this time, on another day it is the other one.
//
// The order follows from the calls: work of one stream, what an event was recorded after and waited for before, and
// what the host synchronised with before it queued more; beside these, from what a kernel learns from the host while it
// runs (ggml_device/device_lookup.cpp). The host counts as one thread, since locks between its threads cannot be seen: a
// thread that waits for another's lock but for no stream is found, a thread that forgets the lock is not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace fake_gpu {

// Of each stream, how much of its work is done for sure. Stream 0 is the host.
using Clock = std::map<uint64_t, uint64_t>;

void join(Clock & into, const Clock & other);

// A piece of work, and what was done for sure before it.
struct Ticket {
    uint64_t stream = 0;
    uint64_t number = 0;
    std::shared_ptr<const Clock> before; // as the calls say
    const Clock * acquired;              // what its stream has learnt while it ran; null on the host
};

// The calling thread does the work of `ticket` while this lives; what it does at other times is the host's.
class Doing {
  public:
    explicit Doing(const Ticket & ticket);
    ~Doing();
};

// Says that the calling thread's work touches `size` bytes of `device` at `bytes`, where they really are; a fault when
// something else touches them too, in no order. `what` is for the message.
void touch(int device, const char * bytes, size_t size, bool writes, const std::string & what);

// Bytes through which streams tell each other something: whoever reads them may know what was done before they were
// written. `touch` of a write publishes that.
void share(const char * bytes, size_t size);
Clock published(const char * bytes, size_t size);

// Has nothing be known of them any more: they were freed.
void forget(const char * bytes, size_t size);

// A stream is gone, and all of its work is done.
void forget_stream(uint64_t stream);

} // namespace fake_gpu
