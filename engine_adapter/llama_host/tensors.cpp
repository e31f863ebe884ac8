#include "llama_host/tensors.h"

#include "ggml-backend.h"
#include "ggml-impl.h"
#include "llama_host/guard.h"

#include <cstdint>
#include <cstring>

namespace expertier {

namespace {

bool is_wanted(const ggml_tensor * tensor) {
    return !ggml_op_is_empty(tensor->op) && tensor->type == GGML_TYPE_F32 && ggml_is_contiguous(tensor) &&
           ggml_nelements(tensor) > 0;
}

} // namespace

TensorFile::~TensorFile() { close(); }

bool TensorFile::open(const char * path) {
    file_ = fopen(path, "wb");
    return file_ != nullptr;
}

bool TensorFile::close() {
    if (file_) {
        is_ok_ = fclose(file_) == 0 && is_ok_;
        file_ = nullptr;
    }
    return is_ok_;
}

bool TensorFile::evaluated(ggml_tensor * tensor, bool ask, void * self) {
    if (ask) {
        return is_wanted(tensor);
    }
    return guarded(false, [&] { // an exception ends the computation: false has the engine stop
        static_cast<TensorFile *>(self)->write(tensor);
        return true;
    });
}

void TensorFile::write(const ggml_tensor * tensor) {
    if (!is_wanted(tensor)) {
        return; // the engine also calls this for the last node of a segment, which may be unwanted
    }
    data_.resize(ggml_nbytes(tensor));
    ggml_backend_tensor_get(tensor, data_.data(), 0, data_.size());
    const int32_t length = (int32_t) strlen(tensor->name), op = tensor->op;
    put(&length, sizeof(length));
    put(tensor->name, (size_t) length);
    put(&op, sizeof(op));
    put(tensor->ne, sizeof(tensor->ne));
    put(data_.data(), data_.size());
}

void TensorFile::put(const void * data, size_t n_bytes) {
    is_ok_ = is_ok_ && fwrite(data, 1, n_bytes, file_) == n_bytes;
}

} // namespace expertier
