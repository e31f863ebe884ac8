// What a kernel finds when the fake runtime compiler compiles it for this machine's CPU.
//
// Blocks run one after another. Threads of a block are plain calls, one after another, unless the source mentions a
// barrier: then each gets a stack of its own and runs until the barrier, so that all reach it before any goes on.
// Not there: warp intrinsics, dynamic shared memory, dynamic parallelism, textures.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <tuple>
#include <ucontext.h>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static thread_local
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
};
struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;
static thread_local unsigned warpSize;

template <class T> static T atomicAdd(T * place, T value) { return __atomic_fetch_add(place, value, __ATOMIC_SEQ_CST); }
template <class T> static T atomicMax(T * place, T value) {
    T old = __atomic_load_n(place, __ATOMIC_SEQ_CST);
    while (old < value && !__atomic_compare_exchange_n(place, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return old;
}
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_system() { __threadfence(); }

namespace expertier_fake {

constexpr size_t STACK_BYTES = 64 << 10, MOST_THREADS = 1024;

struct Fiber {
    ucontext_t context;
    dim3 index;
    bool done;
};
static thread_local ucontext_t scheduler;
static thread_local Fiber * running;
static thread_local void (*body)(void *);
static thread_local void * body_argument;

static inline void barrier() {
    Fiber * me = running;
    swapcontext(&me->context, &scheduler);
    threadIdx = me->index;
}

// ThreadSanitizer would count its entry, and as it never returns, a little more of its stack would be gone with each.
#ifdef __SANITIZE_THREAD__
__attribute__((no_sanitize("thread")))
#endif
static void fiber_main() {
    threadIdx = running->index;
    body(body_argument);
    running->done = true;
    swapcontext(&running->context, &scheduler);
}

static void run_block_of_fibers(unsigned threads, const unsigned * block) {
    static thread_local Fiber * fibers = new Fiber[MOST_THREADS];
    static thread_local char * stacks = (char *) mmap(nullptr, STACK_BYTES * MOST_THREADS, PROT_READ | PROT_WRITE,
                                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (unsigned t = 0; t < threads; t++) {
        fibers[t].index = { t % block[0], t / block[0] % block[1], t / block[0] / block[1] };
        fibers[t].done = false;
        getcontext(&fibers[t].context);
        fibers[t].context.uc_stack.ss_sp = stacks + t * STACK_BYTES;
        fibers[t].context.uc_stack.ss_size = STACK_BYTES;
        fibers[t].context.uc_link = nullptr;
        makecontext(&fibers[t].context, fiber_main, 0);
    }
    for (bool open = true; open;) {
        open = false;
        for (unsigned t = 0; t < threads; t++) {
            if (fibers[t].done) {
                continue;
            }
            running = &fibers[t];
            swapcontext(&scheduler, &running->context);
            open |= !fibers[t].done;
        }
    }
}

template <class... A, size_t... I> static void * pack_all(void ** values, std::index_sequence<I...>) {
    return new std::tuple<A...>(*(A *) values[I]...);
}
template <class... A> static void * pack(void (*)(A...), void ** values) {
    return pack_all<A...>(values, std::index_sequence_for<A...>{});
}

template <class... A>
static void run(void (*kernel)(A...), void * packed, const unsigned * grid, const unsigned * block, unsigned warp) {
    struct Call {
        void (*kernel)(A...);
        std::tuple<A...> * arguments;
    } call = { kernel, (std::tuple<A...> *) packed };
    body = [](void * p) { std::apply(((Call *) p)->kernel, *((Call *) p)->arguments); };
    body_argument = &call;
    gridDim = { grid[0], grid[1], grid[2] };
    blockDim = { block[0], block[1], block[2] };
    warpSize = warp;
    unsigned threads = block[0] * block[1] * block[2];
    for (unsigned z = 0; z < grid[2]; z++) {
        for (unsigned y = 0; y < grid[1]; y++) {
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = { x, y, z };
#ifdef EXPERTIER_FAKE_BARRIERS
                run_block_of_fibers(threads, block);
#else
                for (unsigned t = 0; t < threads; t++) {
                    threadIdx = { t % block[0], t / block[0] % block[1], t / block[0] / block[1] };
                    body(body_argument);
                }
#endif
            }
        }
    }
    delete call.arguments;
}

struct Function {
    void * (*pack)(void **);
    void (*run)(void *, const unsigned *, const unsigned *, unsigned);
};

} // namespace expertier_fake

static inline void __syncthreads() { expertier_fake::barrier(); }

#define EXPERTIER_FAKE_KERNEL(name)                                                                                    \
    extern "C" {                                                                                                       \
    __attribute__((visibility("default"))) expertier_fake::Function expertier_fake_kernel_##name = {                   \
        [](void ** values) { return expertier_fake::pack(&name, values); },                                            \
        [](void * packed, const unsigned * grid, const unsigned * block, unsigned warp) {                              \
            expertier_fake::run(&name, packed, grid, block, warp);                                                     \
        }                                                                                                              \
    };                                                                                                                 \
    }
