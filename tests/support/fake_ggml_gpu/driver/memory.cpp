#include "driver/memory.h"

#include "driver/races.h"
#include "driver/state.h"

#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <sys/mman.h>

namespace fake_gpu {

namespace {

constexpr size_t page = 4096;

struct Range {
    size_t bytes;  // asked for
    size_t mapped; // whole pages
    char * bytes_begin;
    int device;
};

using Ranges = std::map<uintptr_t, Range>; // by the first address

std::shared_mutex mutex; // guards all of these
Ranges allocated;
size_t limits[max_devices];
size_t used[max_devices];

std::shared_mutex pinned_mutex; // guards `pinned`
Ranges pinned;

size_t whole_pages(size_t bytes) { return (bytes + page - 1) / page * page; }

const Range * find(const Ranges & ranges, const void * address, size_t bytes, uintptr_t & begin) {
    const uintptr_t wanted = (uintptr_t) address;
    auto after = ranges.upper_bound(wanted);
    if (after == ranges.begin()) {
        return nullptr;
    }
    --after;
    begin = after->first;
    return wanted - begin + bytes <= after->second.bytes ? &after->second : nullptr;
}

// Takes the range that begins at `address` out of `ranges`; nothing, and a fault, when none begins there.
std::optional<Range> take_out(Ranges & ranges, void * address, const char * problem) {
    const auto found = ranges.find((uintptr_t) address);
    if (found == ranges.end()) {
        fault(0, problem);
        return std::nullopt;
    }
    const Range range = found->second;
    ranges.erase(found);
    return range;
}

char * map(size_t bytes, int protection) {
    void * address = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return address == MAP_FAILED ? nullptr : static_cast<char *>(address);
}

} // namespace

void set_limit(int device, size_t bytes) {
    std::unique_lock<std::shared_mutex> lock(mutex);
    limits[device] = bytes;
}

size_t limit_of(int device) {
    std::shared_lock<std::shared_mutex> lock(mutex);
    return limits[device];
}

size_t used_of(int device) {
    std::shared_lock<std::shared_mutex> lock(mutex);
    return used[device];
}

void * allocate(int device, size_t bytes) {
    counters[device].allocations += 1;
    const size_t mapped = whole_pages(bytes);
    if (must_fail(Call::memory)) {
        return nullptr;
    }
    std::unique_lock<std::shared_mutex> lock(mutex);
    if (used[device] + mapped > limits[device]) {
        return nullptr;
    }
    char * address = map(mapped, PROT_NONE);
    char * data = map(mapped, PROT_READ | PROT_WRITE);
    if (address == nullptr || data == nullptr) {
        return nullptr; // the test machine itself has no more
    }
    if (switches.poison) {
        memset(data, 0xff, mapped);
    }
    used[device] += mapped;
    allocated.emplace((uintptr_t) address, Range{ bytes, mapped, data, device });
    counters[device].live_buffers += 1;
    counters[device].live_bytes += (int64_t) mapped;
    return address;
}

void release(void * address) {
    std::unique_lock<std::shared_mutex> lock(mutex);
    const auto range = take_out(allocated, address, "memory was freed that is not allocated");
    if (!range) {
        return;
    }
    used[range->device] -= range->mapped;
    munmap(address, range->mapped);
    forget(range->bytes_begin, range->mapped);
    munmap(range->bytes_begin, range->mapped);
    counters[range->device].live_buffers -= 1;
    counters[range->device].live_bytes -= (int64_t) range->mapped;
}

char * bytes_at(int device, const void * address, size_t bytes) {
    std::shared_lock<std::shared_mutex> lock(mutex);
    uintptr_t begin = 0;
    const Range * range = find(allocated, address, bytes, begin);
    return range && range->device == device ? range->bytes_begin + ((uintptr_t) address - begin) : nullptr;
}

void * pin(size_t bytes) {
    if (must_fail(Call::pinned)) {
        return nullptr;
    }
    const size_t mapped = whole_pages(bytes);
    char * address = map(mapped, PROT_READ | PROT_WRITE);
    if (address) {
        std::unique_lock<std::shared_mutex> lock(pinned_mutex);
        pinned.emplace((uintptr_t) address, Range{ bytes, mapped, address, 0 });
        counters[0].live_pinned_buffers += 1;
        counters[0].live_pinned_bytes += (int64_t) mapped;
    }
    return address;
}

void unpin(void * address) {
    std::unique_lock<std::shared_mutex> lock(pinned_mutex);
    if (const auto range = take_out(pinned, address, "memory was unpinned that is not pinned")) {
        munmap(address, range->mapped);
        counters[0].live_pinned_buffers -= 1;
        counters[0].live_pinned_bytes -= (int64_t) range->mapped;
    }
}

std::shared_lock<std::shared_mutex> hold_pinned() { return std::shared_lock<std::shared_mutex>(pinned_mutex); }

bool is_still_pinned(const void * address, size_t bytes) {
    uintptr_t begin = 0;
    return find(pinned, address, bytes, begin) != nullptr;
}

bool is_pinned(const void * address, size_t bytes) {
    const auto held = hold_pinned();
    return is_still_pinned(address, bytes);
}

} // namespace fake_gpu
