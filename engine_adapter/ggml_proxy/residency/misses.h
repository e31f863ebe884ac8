// Serves misses. The bytes of a missing expert come from the host pool or from Python; while nobody uses a graph's
// results they are zeros; or misses are refused.
#pragma once

#include "abi/abi.h"
#include "ggml-backend.h"
#include "residency/counters.h"
#include "residency/pool_copies.h"
#include "residency/slot_tensors.h"
#include "residency/tables.h"

#include <atomic>
#include <deque>
#include <vector>

namespace expertier {

class Misses {
  public:
    enum class Filled { no, yes, zeros };
    // Memory for fill(), allocated before slots are chosen: once slots are pinned, no allocation may fail.
    struct FillRoom {
        explicit FillRoom(size_t n) : evicted(n) {
            experts.reserve(n);
            slots.reserve(n);
        }
        std::vector<int32_t> experts, slots; // experts that the host pool has no copies of, and their slots
        std::vector<int32_t> evicted;
    };

    Misses(const expertier_binding & binding, SlotTensors & slots, const ResidencyTables & tables,
           HostCopies & host_copies, Counters & counters);
    Misses(const Misses &) = delete;
    Misses & operator=(const Misses &) = delete;

    // Fills `slots` with `experts`. The copies from host copies that `reads` holds afterwards are queued on `stream`.
    Filled fill(ggml_backend_t stream, int layer, const std::vector<int32_t> & experts,
                const std::vector<int32_t> & slots, HostReads & reads, FillRoom & room);
    // Has Python copy `experts` into a streamed layer that begins at `streamed`; false after an error.
    bool load(int layer, const std::vector<int32_t> & experts, void * streamed);
    // Has Python copy `n_bytes` of a matrix to `out`, beginning at byte `offset` of all of its experts; false where
    // that failed.
    bool read(MatrixRef ref, uint64_t offset, uint64_t n_bytes, void * out);

    // Sets how misses are served from now on, and returns once no fill runs that began before.
    void set_fills(expertier_fills fills);
    bool serves_fills() const { return fills_ == EXPERTIER_FILLS_SERVED; }

    // Marks a call of Python, which set_fills() waits for. It is made before the thread reads how misses are served;
    // set_fills() changes that before it waits, so no call with the old setting escapes the wait.
    class Running {
      public:
        explicit Running(Misses & misses) : n_(misses.fills_running_) { n_ += 1; }
        ~Running() { n_ -= 1; }
        Running(const Running &) = delete;
        Running & operator=(const Running &) = delete;

      private:
        std::atomic<int32_t> & n_;
    };

  private:
    bool fill_from_python(int layer, const std::vector<int32_t> & experts, const std::vector<int32_t> & slots);
    expertier_fills wait_while_filling_zeros() const;
    bool fills_with_zeros(int layer);

    expertier_fill fill_;
    expertier_load load_;
    expertier_read read_;
    void * context_; // the first argument of the three
    SlotTensors & slots_;
    const ResidencyTables & tables_;
    HostCopies & host_copies_;
    Counters & counters_;
    std::atomic<expertier_fills> fills_{ EXPERTIER_FILLS_SERVED };
    std::atomic<int32_t> fills_running_{ 0 };
    // For each layer, the number of the graph whose misses in this layer get zeros; below 0: the next graph's.
    std::deque<std::atomic<int64_t>> zero_fill_graphs_;
};

} // namespace expertier
