// Moves of bytes within a slab, and zeros in it, queued on a stream of their own. The stream and its buffers live as
// long as the slab, because making them costs more than a small move.
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
    // `address` is the slab's base address in the callers' rows.
    QueuedMoves(ggml_backend_buffer_t slab, uintptr_t address);

    // Makes the stream and the buffers, so that the first move is as fast as later moves; false when the device has no
    // memory for them.
    bool prepare();

    // Moves each of `n` rows of (target, source, bytes), in their order, and then fills each of `n_zeros` rows of
    // (target, bytes) with zeros; these should be small. A move's source and target may overlap. False when a row
    // reaches out of the slab, or the device gave no stream; then no work is left in the queue.
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
    char * base_;      // the address by which the backend knows the slab
    std::mutex mutex_; // guards what follows
    Counts counts_;
    bool is_queued_ = false; // work has been queued since the last `finish`
    Buffer between_;         // the buffer for moves by small distances
    Stream stream_;
    QueuedZeros zeros_; // after `stream_`, so that it is destroyed first
};

} // namespace expertier
