#include "queued_moves.h"

#include <algorithm>

namespace expertier {

namespace {

// A range that moves by less than this would be cut into that many pieces: it goes through a buffer, twice as far but in
// larger ones.
constexpr size_t by_little     = 4u << 20;
constexpr size_t between_bytes = 16u << 20;
constexpr size_t zeros_bytes   = 64u << 10;

} // namespace

QueuedMoves::QueuedMoves(ggml_backend_dev_t device) : device_(device), stream_(ggml_backend_dev_init(device, nullptr)) {}

bool QueuedMoves::run(const int64_t * rows, int64_t n) {
    bool is_done = stream_ != nullptr;
    for (int64_t i = 0; i < n && is_done; i++) {
        is_done = move((uintptr_t) rows[3 * i], (uintptr_t) rows[3 * i + 1], (size_t) rows[3 * i + 2]);
    }
    if (stream_) {
        ggml_backend_synchronize(stream_.get());
    }
    return is_done;
}

// As copies of zeros: ggml waits for every memset.
bool QueuedMoves::zero(const int64_t * rows, int64_t n) {
    zeros_ = new_device_buffer(device_, zeros_bytes);
    if (!stream_ || !zeros_) {
        return false;
    }
    void * zeros   = ggml_backend_buffer_get_base(zeros_.get());
    bool   is_done = true;
    for (int64_t i = 0; i < n && is_done; i++) {
        const uintptr_t target = (uintptr_t) rows[2 * i];
        const size_t    size   = (size_t) rows[2 * i + 1];
        for (size_t done = 0; done < size && is_done; done += zeros_bytes) {
            const size_t      part = std::min(zeros_bytes, size - done);
            const DevicePlace to   = find_device_place(reinterpret_cast<void *>(target + done));
            is_done                = to.buffer != nullptr;
            if (is_done) {
                ggml_tensor read  = bytes_at(zeros_.get(), zeros, part);
                ggml_tensor write = bytes_at(to, part);
                ggml_backend_tensor_copy_async(stream_.get(), stream_.get(), &read, &write);
            }
        }
    }
    ggml_backend_synchronize(stream_.get());
    return is_done;
}

bool QueuedMoves::move(uintptr_t target, uintptr_t source, size_t n_bytes) {
    const size_t apart = target > source ? target - source : source - target;
    if (apart == 0) {
        return true;
    }
    if (apart < by_little && n_bytes > 4 * apart && move_through(target, source, n_bytes)) {
        return true;
    }
    const size_t piece = std::min(apart, n_bytes);
    for (size_t done = 0; done < n_bytes; done += piece) {
        const size_t n  = std::min(piece, n_bytes - done);
        const size_t at = target < source ? done : n_bytes - done - n; // never over what is still to be read
        if (!copy(target + at, source + at, n)) {
            return false;
        }
    }
    return true;
}

// False when the device has no memory for the buffer, and nothing has been queued.
bool QueuedMoves::move_through(uintptr_t target, uintptr_t source, size_t n_bytes) {
    if (!between_ && !(between_ = new_device_buffer(device_, between_bytes))) {
        return false;
    }
    char * between = static_cast<char *>(ggml_backend_buffer_get_base(between_.get()));
    for (size_t done = 0; done < n_bytes; done += between_bytes) {
        const size_t      n    = std::min(between_bytes, n_bytes - done);
        const size_t      at   = target < source ? done : n_bytes - done - n;
        const DevicePlace from = find_device_place(reinterpret_cast<void *>(source + at));
        const DevicePlace to   = find_device_place(reinterpret_cast<void *>(target + at));
        if (from.buffer == nullptr || to.buffer == nullptr) {
            return false; // the other way says so, too
        }
        ggml_tensor read  = bytes_at(from, n);
        ggml_tensor kept  = bytes_at(between_.get(), between, n);
        ggml_tensor write = bytes_at(to, n);
        ggml_backend_tensor_copy_async(stream_.get(), stream_.get(), &read, &kept);
        ggml_backend_tensor_copy_async(stream_.get(), stream_.get(), &kept, &write);
    }
    return true;
}

bool QueuedMoves::copy(uintptr_t target, uintptr_t source, size_t n_bytes) {
    const DevicePlace from = find_device_place(reinterpret_cast<void *>(source));
    const DevicePlace to   = find_device_place(reinterpret_cast<void *>(target));
    if (from.buffer == nullptr || to.buffer == nullptr) {
        return false;
    }
    ggml_tensor read  = bytes_at(from, n_bytes);
    ggml_tensor write = bytes_at(to, n_bytes);
    ggml_backend_tensor_copy_async(stream_.get(), stream_.get(), &read, &write);
    return true;
}

} // namespace expertier
