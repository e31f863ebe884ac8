// A small buffer of host memory that the device copies to and from at full speed; plain memory where the device has no
// such host memory.
#pragma once

#include "backend/device_memory.h"
#include "ggml-backend.h"

#include <cstdint>
#include <vector>

namespace expertier {

class PinnedInts {
  public:
    // Room for `n` ints, for copies by the device of `backend`. The buffer's old contents are lost.
    int32_t * reserve(ggml_backend_t backend, size_t n) {
        if (n > capacity_) {
            capacity_ = n < 256 ? 256 : 2 * n;
            buffer_.reset();
            plain_.clear();
            ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(ggml_backend_get_device(backend));
            if (type) {
                buffer_.reset(ggml_backend_buft_alloc_buffer(type, capacity_ * sizeof(int32_t)));
            }
            if (!buffer_) {
                plain_.resize(capacity_);
            }
        }
        return data();
    }
    int32_t * data() {
        return buffer_ ? static_cast<int32_t *>(ggml_backend_buffer_get_base(buffer_.get())) : plain_.data();
    }

  private:
    size_t capacity_ = 0;
    Buffer buffer_;
    std::vector<int32_t> plain_;
};

} // namespace expertier
