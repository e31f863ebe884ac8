// The hand-written side of hot_path.py, and the loops that time both sides.
//
// One thread plays decode: for every step and layer it takes TOP_K experts and gives them back. `compiled_*` does so
// through the policy's C function pointers, `by_hand_*` in plain C++ with what the same job needs: a table from expert
// to slot, readiness, pins, a saturating use count that fades, the time of the last use, and the counters.
#include <algorithm>
#include <cstdint>
#include <ctime>
#include <vector>

namespace {

using begin_fn = int32_t (*)(const int64_t *, int32_t, const int32_t *, int32_t, int32_t *, int32_t *);
using on_slots_fn = int32_t (*)(const int64_t *, int32_t, const int32_t *, int32_t);

constexpr int MAX_TOP_K = 64;

// The thread's own time: what others do on a shared machine between two of its instructions does not count.
double thread_us() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double) now.tv_sec * 1e6 + (double) now.tv_nsec * 1e-3;
}

struct Run {
    int layers, experts, slots, top_k, steps;
    const int32_t * ids; // [steps][layers][top_k]

    const int32_t * at(int step, int layer) const { return ids + (int64_t(step) * layers + layer) * top_k; }

    template <class Call> double us_per_call(Call && call) const {
        const double start = thread_us();
        for (int step = 0; step < steps; ++step) {
            for (int layer = 0; layer < layers; ++layer) {
                call(layer, at(step, layer));
            }
        }
        return (thread_us() - start) / (double(steps) * layers);
    }
};

// A use count with decay, for experts that all stay.
struct CountingLayer {
    std::vector<int32_t> slot_of, owner, pins, heat;
    std::vector<uint8_t> ready;
    std::vector<int64_t> last_use;
    int64_t calls = 0, hits = 0, misses = 0;

    CountingLayer(int experts, int slots)
        : slot_of(experts, -1), owner(slots, -1), pins(slots), heat(experts), ready(slots), last_use(slots) {
        for (int i = 0; i < std::min(experts, slots); ++i) {
            slot_of[i] = i;
            owner[i] = i;
            ready[i] = 1;
        }
    }

    bool begin(const int32_t * ids, int n, int32_t * slots) {
        const int64_t now = ++calls;
        if (now % 20 == 0) {
            for (int32_t & h : heat) {
                h >>= 1;
            }
        }
        for (int i = 0; i < n; ++i) {
            const int32_t slot = slot_of[ids[i]];
            if (slot < 0 || !ready[slot]) {
                return false;
            }
            heat[ids[i]] = std::min(heat[ids[i]] + 16, 255);
            last_use[slot] = now;
            ++pins[slot];
            slots[i] = slot;
        }
        hits += n;
        return true;
    }

    void release(const int32_t * slots, int n) {
        for (int i = 0; i < n; ++i) {
            --pins[slots[i]];
        }
    }
};

// LRU as it is written by hand: a doubly linked list over the slots, the oldest at its head.
struct LruLayer {
    std::vector<int32_t> slot_of, owner, pins, before, after;
    std::vector<uint8_t> ready;
    int64_t calls = 0, hits = 0, misses = 0, evictions = 0, fills = 0;
    int32_t end; // a ring: after[end] is the oldest slot, before[end] the youngest

    LruLayer(int experts, int slots)
        : slot_of(experts, -1), owner(slots, -1), pins(slots), before(slots + 1), after(slots + 1), ready(slots),
          end(slots) {
        for (int i = 0; i <= slots; ++i) {
            after[i] = i == slots ? 0 : i + 1;
            before[i] = i == 0 ? slots : i - 1;
        }
    }

    void touch(int32_t slot) {
        after[before[slot]] = after[slot];
        before[after[slot]] = before[slot];
        before[slot] = before[end];
        after[slot] = end;
        after[before[end]] = slot;
        before[end] = slot;
    }

    int begin(const int32_t * ids, int n, int32_t * slots, int32_t * miss_index) {
        ++calls;
        for (int i = 0; i < n; ++i) {
            const int32_t slot = slot_of[ids[i]];
            slots[i] = slot;
            if (slot >= 0) {
                if (!ready[slot]) {
                    return -1;
                }
                ++pins[slot];
                touch(slot);
            }
        }
        int n_misses = 0;
        for (int i = 0; i < n; ++i) {
            if (slots[i] >= 0) {
                continue;
            }
            int32_t slot = after[end];
            while (slot != end && pins[slot] != 0) {
                slot = after[slot];
            }
            if (slot == end) {
                return -1;
            }
            if (owner[slot] >= 0) {
                slot_of[owner[slot]] = -1;
                ++evictions;
            }
            owner[slot] = ids[i];
            slot_of[ids[i]] = slot;
            ready[slot] = 0;
            pins[slot] = 1;
            touch(slot);
            slots[i] = slot;
            miss_index[n_misses++] = i;
        }
        hits += n - n_misses;
        misses += n_misses;
        return n_misses;
    }

    void complete(const int32_t * slots, int n) {
        for (int i = 0; i < n; ++i) {
            if (!ready[slots[i]]) {
                ready[slots[i]] = 1;
                ++fills;
            }
        }
    }

    void release(const int32_t * slots, int n) {
        for (int i = 0; i < n; ++i) {
            --pins[slots[i]];
        }
    }
};

} // namespace

extern "C" {

// Each returns microseconds a layer call; `misses` becomes how many look-ups missed, and -1 where a call was refused.

double compiled_policy(const Run * run, const int64_t * directory, begin_fn begin, on_slots_fn complete,
                       on_slots_fn release, int64_t * misses) {
    int32_t slots[MAX_TOP_K], miss_index[MAX_TOP_K];
    int64_t missed = 0;
    bool fine = true;
    const double us = run->us_per_call([&](int layer, const int32_t * ids) {
        const int32_t found = begin(directory, layer, ids, run->top_k, slots, miss_index);
        if (found > 0) {
            missed += found;
            complete(directory, layer, slots, run->top_k);
        }
        fine &= found >= 0 && release(directory, layer, slots, run->top_k) == 0;
    });
    *misses = fine ? missed : -1;
    return us;
}

double by_hand_hits(const Run * run, int64_t * misses) {
    std::vector<CountingLayer> layers(run->layers, CountingLayer(run->experts, run->slots));
    int32_t slots[MAX_TOP_K];
    bool fine = true;
    const double us = run->us_per_call([&](int layer, const int32_t * ids) {
        fine &= layers[layer].begin(ids, run->top_k, slots);
        layers[layer].release(slots, run->top_k);
    });
    *misses = fine ? 0 : -1;
    return us;
}

double by_hand_lru(const Run * run, int64_t * misses) {
    std::vector<LruLayer> layers(run->layers, LruLayer(run->experts, run->slots));
    int32_t slots[MAX_TOP_K], miss_index[MAX_TOP_K];
    int64_t missed = 0;
    bool fine = true;
    const double us = run->us_per_call([&](int layer, const int32_t * ids) {
        const int found = layers[layer].begin(ids, run->top_k, slots, miss_index);
        if (found > 0) {
            missed += found;
            layers[layer].complete(slots, run->top_k);
        }
        fine &= found >= 0;
        layers[layer].release(slots, run->top_k);
    });
    *misses = fine ? missed : -1;
    return us;
}
}
