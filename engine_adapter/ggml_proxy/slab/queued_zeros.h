// Zeros in many small pieces of a slab, by one kernel: as rows of a matrix over the slab, of which SET_ROWS writes
// some. As copies of zeros, one a piece, where the device cannot do that, or pieces do not begin and end between rows.
#pragma once

#include "backend/device_memory.h"
#include "ggml-backend.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace expertier {

class QueuedZeros {
  public:
    // `address` is where callers say that the slab begins.
    QueuedZeros(ggml_backend_buffer_t slab, uintptr_t address);

    // Uses `stream` from now on; false when the device has no memory for it.
    bool prepare(ggml_backend_t stream);

    // Takes `n` rows of (address, bytes). False when one of them is not in the slab, or the device has no memory for
    // what its kernel needs to know. What `queue` has queued before must be done.
    bool take(const int64_t * pieces, int64_t n);
    // Queues the zeros, and adds the device's calls to `calls`; false when the device cannot.
    bool queue(int64_t & calls);

  private:
    struct Piece { // from an offset in the slab on
        size_t begin;
        size_t n_bytes;
    };
    struct Batch {    // the matrix, and `n` rows of it that one kernel writes, from `first` in `rows_` on
        size_t begin; // bytes from the slab's base
        int64_t n_rows;
        size_t first;
        size_t n;
    };
    void plan_rows();
    bool reserve_ids(size_t n_bytes);
    bool upload_rows();
    bool write_rows();
    void copy_zeros(const Piece & piece, int64_t & calls);

    ggml_backend_buffer_t slab_;
    uintptr_t address_;
    char * base_; // where the backend has it
    ggml_backend_t stream_ = nullptr;
    bool has_rows_ = false; // the device writes rows
    size_t row_bytes_ = 0;
    std::vector<Piece> pieces_; // left to be copied
    std::vector<int64_t> rows_; // of each batch's matrix
    std::vector<Batch> batches_;
    Buffer zeros_;
    Buffer ids_;      // `rows_` on the device
    Buffer uploaded_; // and in host memory that an upload need not wait for; null: the device has none
    size_t ids_bytes_ = 0;
};

} // namespace expertier
