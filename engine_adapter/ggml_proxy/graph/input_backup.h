// A backup of what a graph reads and does not compute, so that the graph can be run again: the engine's allocator gives
// the memory of an input to later nodes once it has been read for the last time.
#pragma once

#include "backend/device_memory.h"
#include "lookup/device_lookup.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <vector>

struct ggml_cgraph;

namespace expertier {

class InputBackup {
  public:
    void find(const ggml_cgraph * graph);
    // Has room for copies of all of them; false when the device has no memory for it.
    bool reserve(ggml_backend_t backend);
    // What is to be copied for it.
    const std::vector<CopyRow> & rows() const { return rows_; }
    // Queues the way back.
    void restore(ggml_backend_t backend);

  private:
    struct Input {
        ggml_backend_buffer_t buffer;
        void * data;
        size_t n_bytes;
        size_t offset; // of the copy
    };
    char * copy_of(const Input & input) const;

    std::vector<Input> inputs_;
    std::vector<CopyRow> rows_;
    size_t n_bytes_ = 0;
    Buffer copies_;
};

} // namespace expertier
