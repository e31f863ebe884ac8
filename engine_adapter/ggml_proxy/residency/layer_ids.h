// The slot ids of one layer on one backend, in a tensor that redirected nodes take in place of the router's ids.
#pragma once

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "backend/pinned_ids.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace expertier {

class LayerIds {
  public:
    LayerIds() = default;
    ~LayerIds() { free(); }
    LayerIds(const LayerIds &) = delete;
    LayerIds & operator=(const LayerIds &) = delete;

    // A tensor for slot ids that a kernel will write; null when memory ran out.
    ggml_tensor * reserve(ggml_backend_t backend, int64_t n_used, int64_t n_tokens) {
        if (capacity_ < n_used * n_tokens && !grow(backend, n_used * n_tokens)) {
            return nullptr;
        }
        tensor_->ne[0] = n_used;
        tensor_->ne[1] = n_tokens;
        tensor_->nb[1] = n_used * sizeof(int32_t);
        tensor_->nb[2] = tensor_->nb[3] = n_used * n_tokens * sizeof(int32_t);
        return tensor_;
    }

    // Uploads `slots` ([n_used, n_tokens], row by row) in the order of `backend`'s stream; null when memory ran out.
    // The copy that the last call queued must be done.
    ggml_tensor * upload(ggml_backend_t backend, const std::vector<int32_t> & slots, int64_t n_used, int64_t n_tokens) {
        if (reserve(backend, n_used, n_tokens) == nullptr) {
            return nullptr;
        }
        int32_t * host = host_.reserve(backend, slots.size()); // a member, as the queued copy reads it later
        std::copy(slots.begin(), slots.end(), host);
        ggml_backend_tensor_set_async(backend, tensor_, host, 0, slots.size() * sizeof(int32_t));
        return tensor_;
    }

  private:
    bool grow(ggml_backend_t backend, int64_t n) {
        ggml_backend_synchronize(backend); // kernels may still read the old tensor
        free();
        capacity_ = 256;
        while (capacity_ < n) {
            capacity_ *= 2;
        }
        context_ = ggml_init({ 2 * ggml_tensor_overhead(), nullptr, true });
        tensor_ = ggml_new_tensor_1d(context_, GGML_TYPE_I32, capacity_);
        buffer_ = ggml_backend_alloc_ctx_tensors(context_, backend);
        if (buffer_ == nullptr) {
            free();
            return false;
        }
        return true;
    }
    void free() {
        ggml_backend_buffer_free(buffer_);
        ggml_free(context_);
        buffer_ = nullptr;
        context_ = nullptr;
        tensor_ = nullptr;
        capacity_ = 0;
    }

    ggml_context * context_ = nullptr;
    ggml_backend_buffer_t buffer_ = nullptr;
    ggml_tensor * tensor_ = nullptr;
    int64_t capacity_ = 0;
    PinnedInts host_;
};

} // namespace expertier
