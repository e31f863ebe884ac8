// Writes zeros to many small pieces of a slab by one kernel: the pieces are rows of a matrix over the slab, and
// SET_ROWS writes them. Where the device cannot run that, or a piece is not made of whole rows, zeros are copied, piece
// by piece.
#pragma once

#include "backend/device_memory.h"
#include "ggml-backend.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace expertier {

class QueuedZeros {
  public:
    // `address` is the slab's base address in the callers' rows.
    QueuedZeros(ggml_backend_buffer_t slab, uintptr_t address);

    // Uses `stream` from now on; false when the device has no memory for the zeros.
    bool prepare(ggml_backend_t stream);

    // Takes `n` rows of (address, bytes). False when a row is not in the slab, or the device has no memory for the
    // kernel's row numbers. What `queue` has queued before must be done.
    bool take(const int64_t * pieces, int64_t n);
    // Queues the zeros, and adds the device's calls to `calls`; false when the device cannot.
    bool queue(int64_t & calls);

  private:
    struct Piece {
        size_t begin; // offset in the slab
        size_t n_bytes;
    };
    struct Batch {      // a matrix over the slab, and the rows of it that one kernel writes
        size_t begin;   // bytes from the slab's base to the matrix
        int64_t n_rows; // of the matrix
        size_t first;   // where the rows to write begin in `rows_`
        size_t n;       // how many rows to write
    };
    void plan_rows();
    bool reserve_ids(size_t n_bytes);
    bool upload_rows();
    bool write_rows();
    void copy_zeros(const Piece & piece, int64_t & calls);

    ggml_backend_buffer_t slab_;
    uintptr_t address_;
    char * base_; // the address by which the backend knows the slab
    ggml_backend_t stream_ = nullptr;
    bool has_rows_ = false; // the device can run SET_ROWS here
    size_t row_bytes_ = 0;
    std::vector<Piece> pieces_; // the pieces taken; after plan_rows(), those to be zeroed by copies
    std::vector<int64_t> rows_; // row numbers in the matrix of each batch, batch after batch
    std::vector<Batch> batches_;
    Buffer zeros_;
    Buffer ids_;      // `rows_` on the device
    Buffer uploaded_; // `rows_` in pinned host memory; null where the device has none
    size_t ids_bytes_ = 0;
};

} // namespace expertier
