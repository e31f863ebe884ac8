// Moves of bytes within memory of a device, queued on a stream of their own. Source and target may overlap.
#pragma once

#include "device_memory.h"
#include "ggml-backend.h"

#include <cstdint>
#include <memory>

namespace expertier {

class QueuedMoves {
  public:
    explicit QueuedMoves(ggml_backend_dev_t device);

    // Moves each of `n` rows of (target, source, bytes), in their order, and waits. False when one of them lies in no memory
    // that we know, or the device gave no stream.
    bool run(const int64_t * rows, int64_t n);

    // Fills each of `n` rows of (target, bytes) with zeros, and waits. Pieces are meant to be small. False as above.
    bool zero(const int64_t * rows, int64_t n);

  private:
    bool move(uintptr_t target, uintptr_t source, size_t n_bytes);
    bool move_through(uintptr_t target, uintptr_t source, size_t n_bytes);
    bool copy(uintptr_t target, uintptr_t source, size_t n_bytes);

    struct FreeBackend {
        void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
    };
    ggml_backend_dev_t                         device_;
    Buffer                                     between_; // for moves by little
    Buffer                                     zeros_;
    std::unique_ptr<ggml_backend, FreeBackend> stream_;  // goes first: it may still read the buffer
};

} // namespace expertier
