// A file of all tensors that a context computes, in which the first tensor that differs between two runs can be found.
#pragma once

#include "ggml.h"

#include <cstdio>
#include <string>
#include <vector>

namespace expertier {

// One record for each float32 tensor, in the order of computing: int32 length of its name, the name, int32 operation
// (ggml_op), int64 ne[4], the values.
class TensorFile {
  public:
    TensorFile() = default;
    ~TensorFile();
    TensorFile(const TensorFile &) = delete;
    TensorFile & operator=(const TensorFile &) = delete;

    // Makes the file; false, with errno set, where that fails.
    bool open(const char * path);
    // Closes the file; false when a record could not be written, and the file ends before it.
    bool close();

    // A ggml_backend_sched_eval_callback.
    static bool evaluated(ggml_tensor * tensor, bool ask, void * self);

  private:
    void write(const ggml_tensor * tensor);
    void put(const void * data, size_t n_bytes);

    FILE * file_ = nullptr;
    bool is_ok_ = true;
    std::vector<char> data_;
};

} // namespace expertier
