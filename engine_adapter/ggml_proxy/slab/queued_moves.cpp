#include "slab/queued_moves.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <chrono>
#include <new>

namespace expertier {

namespace {

// A range that moves by a distance d can be copied in pieces of at most d bytes. For small distances that would be many
// pieces, so the range is copied through a buffer: twice as many bytes, but in larger pieces.
constexpr size_t by_little = 4u << 20;
constexpr size_t between_bytes = 16u << 20;

class Timed { // adds its lifetime to a total, in nanoseconds
  public:
    explicit Timed(int64_t & total) : total_(total), start_(std::chrono::steady_clock::now()) {}
    ~Timed() {
        const auto taken = std::chrono::steady_clock::now() - start_;
        total_ += std::chrono::duration_cast<std::chrono::nanoseconds>(taken).count();
    }
    Timed(const Timed &) = delete;
    Timed & operator=(const Timed &) = delete;

  private:
    int64_t & total_;
    std::chrono::steady_clock::time_point start_;
};

} // namespace

QueuedMoves::QueuedMoves(ggml_backend_buffer_t slab, uintptr_t address)
    : device_(ggml_backend_buft_get_device(ggml_backend_buffer_get_type(slab))), slab_(slab), address_(address),
      base_(static_cast<char *>(ggml_backend_buffer_get_base(slab))), zeros_(slab, address) {}

bool QueuedMoves::prepare() {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!stream_) {
        stream_.reset(ggml_backend_dev_init(device_, nullptr));
    }
    return stream_ && zeros_.prepare(stream_.get());
}

bool QueuedMoves::queue(const int64_t * rows, int64_t n, const int64_t * zeros, int64_t n_zeros) {
    if (!prepare()) {
        return false;
    }
    std::lock_guard<std::mutex> guard(mutex_);
    if (is_queued_) {
        ggml_backend_synchronize(stream_.get()); // the last call's upload may not have been read yet
    }
    Timed timed(counts_.queue_ns);
    is_queued_ = true; // set first, because a part may be queued when an error comes
    bool done = false;
    try {
        done = queue_all(rows, n, zeros, n_zeros);
    } catch (const std::bad_alloc &) {
        // handled like a device without memory: nothing stays queued
    }
    if (!done) {
        ggml_backend_synchronize(stream_.get());
        is_queued_ = false;
    }
    return done;
}

void QueuedMoves::finish() {
    std::lock_guard<std::mutex> guard(mutex_);
    if (is_queued_) {
        Timed timed(counts_.wait_ns);
        ggml_backend_synchronize(stream_.get());
        is_queued_ = false;
    }
}

QueuedMoves::Counts QueuedMoves::counts() {
    std::lock_guard<std::mutex> guard(mutex_);
    return counts_;
}

bool QueuedMoves::queue_all(const int64_t * rows, int64_t n, const int64_t * zeros, int64_t n_zeros) {
    if (!zeros_.take(zeros, n_zeros)) {
        return false;
    }
    const size_t slab_bytes = ggml_backend_buffer_get_size(slab_);
    for (int64_t i = 0; i < n; i++) {
        const size_t target = (uintptr_t) rows[3 * i] - address_; // an address below the slab wraps to a huge offset
        const size_t source = (uintptr_t) rows[3 * i + 1] - address_;
        const size_t n_bytes = (size_t) rows[3 * i + 2];
        if (n_bytes > slab_bytes || target > slab_bytes - n_bytes || source > slab_bytes - n_bytes) {
            return false;
        }
        move(target, source, n_bytes);
    }
    return zeros_.queue(counts_.copies); // last, so that the zeros are planned while the device moves bytes
}

void QueuedMoves::move(size_t target, size_t source, size_t n_bytes) {
    const size_t apart = target > source ? target - source : source - target;
    if (apart == 0 || (apart < by_little && n_bytes > 4 * apart && move_through(target, source, n_bytes))) {
        return;
    }
    const size_t piece = std::min(apart, n_bytes);
    for (size_t done = 0; done < n_bytes; done += piece) {
        const size_t n = std::min(piece, n_bytes - done);
        const size_t at = target < source ? done : n_bytes - done - n; // so that unread bytes are never overwritten
        queue_copy(stream_.get(), slab_, base_ + source + at, slab_, base_ + target + at, n);
        counts_.copies += 1;
    }
}

// False when the device has no memory for the buffer, and nothing has been queued.
bool QueuedMoves::move_through(size_t target, size_t source, size_t n_bytes) {
    if (!between_ && !(between_ = new_device_buffer(device_, between_bytes))) {
        return false;
    }
    void * between = ggml_backend_buffer_get_base(between_.get());
    for (size_t done = 0; done < n_bytes; done += between_bytes) {
        const size_t n = std::min(between_bytes, n_bytes - done);
        const size_t at = target < source ? done : n_bytes - done - n;
        queue_copy(stream_.get(), slab_, base_ + source + at, between_.get(), between, n);
        queue_copy(stream_.get(), between_.get(), between, slab_, base_ + target + at, n);
        counts_.copies += 2;
    }
    return true;
}

} // namespace expertier
