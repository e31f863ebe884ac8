// Moves of bytes within a slab, and zeros in it, queued on a stream of their own that lives as long as the slab: what a
// stream and its buffers cost to make is more than a small move.
#pragma once

#include "backend/device_memory.h"
#include "ggml-backend.h"
#include "slab/queued_zeros.h"

#include <cstdint>
#include <memory>
#include <mutex>

namespace expertier {

class QueuedMoves {
  public:
    // `address` is where callers say that the slab begins.
    QueuedMoves(ggml_backend_buffer_t slab, uintptr_t address);

    // Has all that is needed, so that the first move is no slower than others; false when the device has not.
    bool prepare();

    // Moves each of `n` rows of (target, source, bytes), in their order, and then fills each of `n_zeros` rows of
    // (target, bytes) with zeros, which are meant to be small. A move's source and target may overlap. False when one
    // of them reaches out of the slab, or the device gave no stream; nothing is queued any more then.
    bool queue(const int64_t * rows, int64_t n, const int64_t * zeros, int64_t n_zeros);

    // Waits for what is queued.
    void finish();

    struct Counts {
        int64_t copies = 0; // calls of the device
        int64_t queue_ns = 0;
        int64_t wait_ns = 0; // in `finish`
    };
    Counts counts();

  private:
    // Offsets in the slab.
    bool queue_all(const int64_t * rows, int64_t n, const int64_t * zeros, int64_t n_zeros);
    void move(size_t target, size_t source, size_t n_bytes);
    bool move_through(size_t target, size_t source, size_t n_bytes);

    ggml_backend_dev_t device_;
    ggml_backend_buffer_t slab_;
    uintptr_t address_;
    char * base_;      // where the backend has it
    std::mutex mutex_; // guards what follows
    Counts counts_;
    bool is_queued_ = false; // since `finish`
    Buffer between_;         // for moves by little
    Stream stream_;
    QueuedZeros zeros_; // goes before the stream
};

} // namespace expertier
