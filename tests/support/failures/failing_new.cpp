// Linked into a build of the proxy of the tests' own: an allocation of it fails, or its deadlines come early, on
// demand. Both for the calling thread only.

#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <new>
#include <sys/syscall.h>
#include <unistd.h>

#define TEST_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

thread_local int64_t allocations_left = 0; // 0: none fails
thread_local bool has_failed = false;
thread_local int64_t seconds_early = 0;

} // namespace

// Has the n-th allocation from now on fail, once; none when `n` is 0.
TEST_EXPORT void fail_allocation(int64_t n) {
    allocations_left = n;
    has_failed = false;
}

// Whether it has.
TEST_EXPORT int32_t allocation_has_failed(void) { return has_failed; }

// Has the proxy think that it is `seconds` earlier, so that its deadlines lie that much nearer.
TEST_EXPORT void set_seconds_early(int64_t seconds) { seconds_early = seconds; }

void * operator new(size_t size) {
    if (allocations_left > 0 && --allocations_left == 0) {
        has_failed = true;
        throw std::bad_alloc();
    }
    if (void * memory = std::malloc(size ? size : 1)) {
        return memory;
    }
    throw std::bad_alloc();
}

void operator delete(void * memory) noexcept { std::free(memory); }
void operator delete(void * memory, size_t) noexcept { std::free(memory); }

extern "C" int clock_gettime(clockid_t clock, timespec * now) noexcept {
    const long status = syscall(SYS_clock_gettime, clock, now);
    now->tv_sec -= seconds_early;
    return (int) status;
}
