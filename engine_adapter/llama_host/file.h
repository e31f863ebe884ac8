// A read-only FILE that shows a model's files as one GGUF and never reads the experts in them: where an expert's bytes
// would be, a read leaves the loader's buffer as it was.
#pragma once

#include "llama_host/abi.h"

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace expertier {

constexpr int32_t extent_header = -1, extent_experts = -2; // expertier_extent::file

class ModelFiles {
  public:
    ModelFiles() = default;
    ~ModelFiles();
    ModelFiles(const ModelFiles &) = delete;
    ModelFiles & operator=(const ModelFiles &) = delete;

    // Opens the files. Returns false and fills `error` when a file cannot be opened, or is not the file described.
    bool open(const expertier_model_options & options, std::string & error);
    // A stream over all extents; null, with errno set, when it cannot be made. This object must outlive the stream.
    FILE * stream();

    int64_t bytes_read() const { return bytes_read_; }
    int64_t expert_bytes() const { return expert_bytes_; }

  private:
    static ssize_t read(void * self, char * out, size_t wanted);
    static int seek(void * self, off64_t * offset, int whence);
    ssize_t read_extent(const expertier_extent & extent, char * out, int64_t wanted);
    int64_t size() const { return extents_.empty() ? 0 : extents_.back().end; }

    std::vector<int> descriptors_;
    std::vector<expertier_extent> extents_;
    const char * header_ = nullptr;
    int64_t position_ = 0;
    int64_t bytes_read_ = 0;
    int64_t expert_bytes_ = 0;
};

} // namespace expertier
