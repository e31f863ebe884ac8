// A backup of a graph's inputs, which the graph reads and does not compute, so that the graph can be run again. Without
// it that is not possible: the engine's allocator gives an input's memory to later nodes after its last read.
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
    // Makes room for copies of all inputs; false when the device has no memory for them.
    bool reserve(ggml_backend_t backend);
    // The copies that make the backup.
    const std::vector<CopyRow> & rows() const { return rows_; }
    // Queues the copies from the backup back to the inputs.
    void restore(ggml_backend_t backend);

  private:
    struct Input {
        ggml_backend_buffer_t buffer;
        void * data;
        size_t n_bytes;
        size_t offset; // of the input's copy in the backup
    };
    char * copy_of(const Input & input) const;

    std::vector<Input> inputs_;
    std::vector<CopyRow> rows_;
    size_t n_bytes_ = 0;
    Buffer copies_;
};

} // namespace expertier
