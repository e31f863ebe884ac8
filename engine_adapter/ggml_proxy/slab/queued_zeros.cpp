#include "slab/queued_zeros.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>

namespace expertier {

namespace {

constexpr size_t zeros_bytes = 4u << 10;
constexpr size_t least_ids = 4u << 10; // bytes
constexpr size_t largest_row = 512;
constexpr size_t smallest_row = 32;        // smaller rows would be too many: such pieces are zeroed by copies
constexpr size_t slot_alignment = 128;     // where the first slot begins
constexpr size_t most_by_rows = 16u << 10; // no guard of a slot is longer; longer pieces are zeroed by copies
// Some backends limit the bytes of a tensor, so a matrix covers only a part of the slab.
constexpr size_t window_bytes = 1u << 30;

struct FreeContext {
    void operator()(ggml_context * context) const { ggml_free(context); }
};

ggml_tensor * tensor_at(ggml_context * context, ggml_type type, int64_t ne0, int64_t ne1, ggml_backend_buffer_t buffer,
                        void * data) {
    ggml_tensor * tensor = ggml_new_tensor_2d(context, type, ne0, ne1);
    tensor->buffer = buffer;
    tensor->data = data;
    return tensor;
}

char * base_of(const Buffer & buffer) { return static_cast<char *>(ggml_backend_buffer_get_base(buffer.get())); }

} // namespace

QueuedZeros::QueuedZeros(ggml_backend_buffer_t slab, uintptr_t address)
    : slab_(slab), address_(address), base_(static_cast<char *>(ggml_backend_buffer_get_base(slab))) {}

bool QueuedZeros::prepare(ggml_backend_t stream) {
    if (zeros_) {
        return true;
    }
    ggml_backend_dev_t device = ggml_backend_get_device(stream);
    zeros_ = new_device_buffer(device, zeros_bytes);
    if (!zeros_) {
        return false;
    }
    stream_ = stream;
    // A backend without queued copies, such as RPC's over a network, is not trusted to run a kernel on a part of a
    // buffer.
    has_rows_ = stream->iface.cpy_tensor_async != nullptr;
    if (has_rows_) {
        std::unique_ptr<ggml_context, FreeContext> scope(ggml_init({ 5 * ggml_tensor_overhead(), nullptr, true }));
        const int64_t width = smallest_row / sizeof(float);
        ggml_tensor * slab = tensor_at(scope.get(), GGML_TYPE_F32, width, 16, slab_, base_);
        ggml_tensor * zeros = tensor_at(scope.get(), GGML_TYPE_F32, width, 4, zeros_.get(), base_of(zeros_));
        zeros->nb[1] = 0;
        ggml_tensor * ids = tensor_at(scope.get(), GGML_TYPE_I64, 4, 1, zeros_.get(), base_of(zeros_));
        has_rows_ = ggml_backend_dev_supports_op(device, ggml_set_rows(scope.get(), slab, zeros, ids));
    }
    return true;
}

bool QueuedZeros::take(const int64_t * pieces, int64_t n) {
    pieces_.clear();
    const size_t slab_bytes = ggml_backend_buffer_get_size(slab_);
    const size_t row_bytes = row_bytes_ ? row_bytes_ : largest_row; // an estimate: the last call's rows
    size_t n_rows = 0;
    for (int64_t i = 0; i < n; i++) {
        const Piece piece = { (uintptr_t) pieces[2 * i] - address_, (size_t) pieces[2 * i + 1] };
        if (piece.n_bytes > slab_bytes || piece.begin > slab_bytes - piece.n_bytes) {
            return false;
        }
        pieces_.push_back(piece);
        n_rows += piece.n_bytes <= most_by_rows ? (piece.n_bytes + row_bytes - 1) / row_bytes : 0;
    }
    return !has_rows_ || n_rows == 0 || reserve_ids(n_rows * sizeof(int64_t));
}

bool QueuedZeros::queue(int64_t & calls) {
    rows_.clear();
    batches_.clear();
    if (has_rows_) {
        plan_rows();
    }
    if (!batches_.empty()) {
        if (!upload_rows() || !write_rows()) {
            return false;
        }
        calls += (int64_t) batches_.size() + 1; // 1 for the upload
    }
    for (const Piece & piece : pieces_) {
        copy_zeros(piece, calls);
    }
    return true;
}

// Plans rows for the pieces that rows can zero, and leaves the other pieces in `pieces_`.
void QueuedZeros::plan_rows() {
    const auto fits = [](const Piece & piece) {
        return piece.n_bytes > 0 && piece.n_bytes <= most_by_rows &&
               (piece.begin | piece.n_bytes) % smallest_row == 0 &&
               piece.begin / window_bytes == (piece.begin + piece.n_bytes - 1) / window_bytes;
    };
    const auto apart =
        std::stable_partition(pieces_.begin(), pieces_.end(), [&](const Piece & piece) { return !fits(piece); });
    size_t bits = largest_row;
    for (auto piece = apart; piece != pieces_.end(); ++piece) {
        bits |= piece->begin | piece->n_bytes;
    }
    row_bytes_ = bits & (~bits + 1); // the largest power of two that divides all of these numbers

    std::map<size_t, std::vector<int64_t>> by_window;
    for (auto piece = apart; piece != pieces_.end(); ++piece) {
        std::vector<int64_t> & rows = by_window[piece->begin / window_bytes];
        for (size_t done = 0; done < piece->n_bytes; done += row_bytes_) {
            rows.push_back((int64_t) ((piece->begin % window_bytes + done) / row_bytes_));
        }
    }
    pieces_.erase(apart, pieces_.end());
    for (const auto & [window, rows] : by_window) {
        const auto [lowest, last] = std::minmax_element(rows.begin(), rows.end());
        // The matrix begins near its lowest row, because the engine may be writing below the slots.
        const int64_t begin = *lowest - *lowest % (int64_t) std::max<size_t>(slot_alignment / row_bytes_, 1);
        batches_.push_back(
            { window * window_bytes + begin * row_bytes_, *last - begin + 1, rows_.size(), rows.size() });
        std::transform(rows.begin(), rows.end(), std::back_inserter(rows_),
                       [begin](int64_t row) { return row - begin; });
    }
}

bool QueuedZeros::reserve_ids(size_t n_bytes) {
    if (n_bytes <= ids_bytes_) {
        return true;
    }
    ggml_backend_dev_t device = ggml_backend_get_device(stream_);
    ggml_backend_buffer_type_t host = ggml_backend_dev_host_buffer_type(device);
    const size_t size = std::max(2 * n_bytes, least_ids);
    ids_bytes_ = 0;
    ids_ = new_device_buffer(device, size);
    uploaded_.reset(ids_ && host ? ggml_backend_buft_alloc_buffer(host, size) : nullptr);
    ids_bytes_ = ids_ ? size : 0;
    return ids_ != nullptr;
}

// Uploads from pinned memory, because moves are queued already: from pageable memory, CUDA may have the caller wait for
// these moves.
bool QueuedZeros::upload_rows() {
    const size_t n_bytes = rows_.size() * sizeof(int64_t);
    if (!reserve_ids(n_bytes)) {
        return false;
    }
    const void * from = rows_.data();
    if (uploaded_) {
        from = memcpy(base_of(uploaded_), rows_.data(), n_bytes);
    }
    ggml_tensor ids = bytes_at(ids_.get(), base_of(ids_), n_bytes);
    ggml_backend_tensor_set_async(stream_, &ids, from, 0, n_bytes);
    return true;
}

bool QueuedZeros::write_rows() {
    const size_t n_batches = batches_.size();
    std::unique_ptr<ggml_context, FreeContext> scope(ggml_init(
        { 4 * n_batches * ggml_tensor_overhead() + ggml_graph_overhead_custom(4 * n_batches, false), nullptr, true }));
    ggml_cgraph * graph = ggml_new_graph_custom(scope.get(), 4 * n_batches, false);
    const int64_t width = (int64_t) (row_bytes_ / sizeof(float));
    for (const Batch & batch : batches_) {
        ggml_tensor * slab = tensor_at(scope.get(), GGML_TYPE_F32, width, batch.n_rows, slab_, base_ + batch.begin);
        ggml_tensor * zeros =
            tensor_at(scope.get(), GGML_TYPE_F32, width, (int64_t) batch.n, zeros_.get(), base_of(zeros_));
        zeros->nb[1] = 0; // every row of this matrix is the same row of zeros
        ggml_tensor * ids = tensor_at(scope.get(), GGML_TYPE_I64, (int64_t) batch.n, 1, ids_.get(),
                                      base_of(ids_) + batch.first * sizeof(int64_t));
        ggml_tensor * written = ggml_set_rows(scope.get(), slab, zeros, ids);
        written->buffer = slab_;
        ggml_build_forward_expand(graph, written);
    }
    return ggml_backend_graph_compute_async(stream_, graph) == GGML_STATUS_SUCCESS;
}

void QueuedZeros::copy_zeros(const Piece & piece, int64_t & calls) {
    for (size_t done = 0; done < piece.n_bytes; done += zeros_bytes) {
        queue_copy(stream_, zeros_.get(), base_of(zeros_), slab_, base_ + piece.begin + done,
                   std::min(zeros_bytes, piece.n_bytes - done));
        calls += 1;
    }
}

} // namespace expertier
