#include "driver/races.h"

#include "driver/state.h"
#include "driver/stream.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <vector>

namespace fake_gpu {

namespace {

struct Touch {
    uint64_t stream = 0;
    uint64_t number = 0; // 0: none
    std::string what;
};

struct Segment {
    uintptr_t end;
    Touch write;              // the last one
    std::vector<Touch> reads; // since then, the last of each stream
};

std::mutex mutex;                      // guards what follows
std::map<uintptr_t, Segment> segments; // by their first address; they do not overlap
std::set<uint64_t> gone;               // streams

struct Shared {
    uintptr_t end;
    Clock clock; // of all writes
};
std::map<uintptr_t, Shared> shared; // by their first address; they do not overlap

thread_local const Ticket * doing = nullptr;

// Has a segment begin at `address`, where one lies across it.
void split(uintptr_t address) {
    auto after = segments.upper_bound(address);
    if (after == segments.begin()) {
        return;
    }
    auto & [begin, segment] = *--after;
    if (begin < address && address < segment.end) {
        Segment second = segment;
        segment.end = address;
        segments.emplace(address, std::move(second));
    }
}

bool knows(const Clock & clock, const Touch & touch) {
    const auto known = clock.find(touch.stream);
    return known != clock.end() && touch.number <= known->second;
}

bool is_before(const Touch & touch, const Ticket & ticket) {
    if (touch.number == 0 || touch.stream == ticket.stream || gone.count(touch.stream)) {
        return true;
    }
    return knows(*ticket.before, touch) || (ticket.acquired && knows(*ticket.acquired, touch));
}

std::string name_of(uint64_t stream) { return stream ? "stream " + std::to_string(stream) : "the host"; }

void report(int device, const Touch & first, const Ticket & ticket, const std::string & what) {
    fault(device, "race: " + what + " on " + name_of(ticket.stream) + " and " + first.what + " on " +
                      name_of(first.stream) + " touch the same bytes, and nothing orders them");
}

// Adds the touch to what is known of a segment; false when it is a race, which has been reported.
bool touch_segment(int device, Segment & segment, const Ticket & ticket, bool writes, const std::string & what) {
    bool is_ordered = is_before(segment.write, ticket);
    if (!is_ordered) {
        report(device, segment.write, ticket, what);
    }
    const Touch mine = { ticket.stream, ticket.number, what };
    if (writes) {
        for (const Touch & read : segment.reads) {
            if (is_ordered && !is_before(read, ticket)) {
                is_ordered = false;
                report(device, read, ticket, what);
            }
        }
        segment.write = mine;
        segment.reads.clear();
        return is_ordered;
    }
    const auto same = std::find_if(segment.reads.begin(), segment.reads.end(),
                                   [&](const Touch & read) { return read.stream == ticket.stream; });
    if (same == segment.reads.end()) {
        segment.reads.push_back(mine);
    } else {
        *same = mine;
    }
    return is_ordered;
}

// Adds what is done for sure once the writing is.
void publish(uintptr_t begin, uintptr_t end, const Ticket & ticket) {
    auto at = shared.upper_bound(begin);
    if (at == shared.begin()) {
        return;
    }
    auto & [first, range] = *--at;
    if (first <= begin && end <= range.end) {
        join(range.clock, *ticket.before);
        if (ticket.acquired) {
            join(range.clock, *ticket.acquired);
        }
        uint64_t & number = range.clock[ticket.stream];
        number = std::max(number, ticket.number);
    }
}

} // namespace

void join(Clock & into, const Clock & other) {
    for (const auto & [stream, number] : other) {
        uint64_t & mine = into[stream];
        mine = std::max(mine, number);
    }
}

Doing::Doing(const Ticket & ticket) { doing = &ticket; }
Doing::~Doing() { doing = nullptr; }

void touch(int device, const char * bytes, size_t size, bool writes, const std::string & what) {
    if (!switches.races || size == 0) {
        return;
    }
    const Ticket ticket = doing ? *doing : host_ticket();
    std::lock_guard<std::mutex> guard(mutex);
    const uintptr_t begin = (uintptr_t) bytes, end = begin + size;
    split(begin);
    split(end);
    if (writes) {
        publish(begin, end, ticket);
    }
    bool is_ordered = true; // so far: one report a touch is enough
    uintptr_t next = begin;
    auto segment = segments.lower_bound(begin);
    while (next < end) {
        if (segment == segments.end() || segment->first > next) { // nothing is known up to there
            const uintptr_t until = segment == segments.end() ? end : std::min(end, segment->first);
            segment = segments.emplace_hint(segment, next, Segment{ until, {}, {} });
        }
        if (is_ordered) {
            is_ordered = touch_segment(device, segment->second, ticket, writes, what);
        }
        next = segment->second.end;
        ++segment;
    }
}

void share(const char * bytes, size_t size) {
    std::lock_guard<std::mutex> guard(mutex);
    shared.try_emplace((uintptr_t) bytes, Shared{ (uintptr_t) bytes + size, {} });
}

Clock published(const char * bytes, size_t) {
    std::lock_guard<std::mutex> guard(mutex);
    const auto found = shared.find((uintptr_t) bytes);
    return found == shared.end() ? Clock() : found->second.clock;
}

void forget(const char * bytes, size_t size) {
    std::lock_guard<std::mutex> guard(mutex);
    const uintptr_t begin = (uintptr_t) bytes, end = begin + size;
    shared.erase(shared.lower_bound(begin), shared.lower_bound(end));
    split(begin);
    split(end);
    segments.erase(segments.lower_bound(begin), segments.lower_bound(end));
}

void forget_stream(uint64_t stream) {
    std::lock_guard<std::mutex> guard(mutex);
    gone.insert(stream);
}

} // namespace fake_gpu
