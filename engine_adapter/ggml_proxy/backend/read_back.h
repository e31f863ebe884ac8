// Serves the engine's own reads of expert tensors, when it saves a model, dumps tensors or copies them to another
// backend. The bytes come from the model's file.
#pragma once

#include "residency/tiers.h"

#include <cstddef>
#include <map>

namespace expertier {

// The expert tensors of a buffer by their addresses: the engine also reads through views and copies of the tensor's
// struct.
class Readable {
  public:
    void add(const ggml_tensor * tensor, Tiers & tiers, MatrixRef ref);

    // Copies `n_rows` pieces of `size` bytes of `tensor` to `out`. The first piece begins at `offset`, and the
    // beginnings are `stride` bytes apart in the tensor and `out_stride` bytes apart in `out`. ggml's read calls return
    // no status, so a failed read throws std::runtime_error, and sets the thread's error (residency/errors.h).
    void read(const ggml_tensor * tensor, void * out, size_t offset, size_t size, size_t n_rows = 1, size_t stride = 0,
              size_t out_stride = 0) const;

  private:
    struct Matrix {
        size_t n_bytes;
        Tiers * tiers;
        MatrixRef ref;
    };
    std::map<const char *, Matrix> by_address_;
};

} // namespace expertier
