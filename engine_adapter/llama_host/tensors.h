// A file of what a context computes, tensor by tensor: to find the first one in which two runs differ.
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

    // False, with errno set, where the file cannot be made.
    bool open(const char * path);
    // False where a record could not be written: the file ends there.
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
