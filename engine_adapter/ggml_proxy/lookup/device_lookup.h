// Device look-ups: expert ids become slot ids on the GPU, and the host is asked only where an expert is missing.
//
//     engine's stream   ── router ─ record ┐                                                ┌ wait ─ experts ─ ...
//     look-up's stream                     └ wait ─ kernel (hip/kernels/device_lookup.cu) ─ record ┘
//
// The host queues a graph with all of its look-ups before the first one runs. The kernel writes what it found to a
// mailbox in host memory. Where experts are missing, it holds both streams until the host has filled their slots and
// the table over a third stream, and has answered in the mailbox.
#pragma once

#include "abi/abi.h"
#include "backend/device_memory.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace expertier {

// Rows of a hidden state that a look-up copies, for the kernel that predicts from them.
struct SavedRows {
    const void * rows = nullptr;
    uint64_t row_bytes = 0;
    uint32_t n_hidden = 0; // floats a row
    uint32_t n_tokens = 0; // 0: nothing is copied
    float * copy = nullptr;
};

// Bytes that are copied within the device, as in hip/kernels/moves.cu.
struct CopyRow {
    uint64_t target, source, n_bytes;
};

class DeviceLookup {
  public:
    static constexpr int64_t max_rows = 64;

    // `n_experts` has each layer's number of experts. Throws std::runtime_error where the device gives no memory,
    // stream or event, and where the kernel fails a trial.
    DeviceLookup(const expertier_device_lookup & driver, ggml_backend_dev_t device, const std::vector<int> & n_experts);

    // Tries a capture, where the driver has them. Where the trial fails, returns why, and captures nothing from then
    // on.
    std::string try_capture(ggml_backend_dev_t device);

    // Begins a graph. Its look-ups bear its number: once a look-up has given up waiting, later look-ups of the same
    // graph do not wait either. To be called when all look-ups of the graph before have been answered.
    void begin_graph();
    // Numbers that change with each graph, for the kernels that are queued for the layer: `n_launch_params` words.
    static constexpr size_t n_launch_params = 16;
    uint32_t * launch_params(int layer) const { return host_launch_params() + (layer + 1) * n_launch_params; }
    uint64_t device_launch_params(int layer) const;
    uint64_t device_number() const { return device_launch_params(-1); } // the graph's number
    uint32_t number() const { return graph_; }
    // The graph that has begun will look up `n_rows` ids of the layer.
    void expect(int layer, uint32_t n_rows);

    // Queues the launch parameters, and copies that they are to be followed by, behind what is queued on `compute`,
    // which waits for them. No look-up may be queued before that. False when the driver refused.
    bool send_launch_params(ggml_backend_t compute, const std::vector<CopyRow> & rows = {});

    // Queues the look-up of a layer behind what is queued on `compute`, which waits for it: `slots` (int32, as many as
    // the ids are) gets the slot ids. False when the driver refused.
    bool queue(ggml_backend_t compute, int layer, const ggml_tensor * ids, ggml_tensor * slots,
               const SavedRows & saved = {});

    bool wait_for(ggml_backend_t compute);  // our stream waits for the work queued on `compute`
    bool make_wait(ggml_backend_t compute); // work queued on `compute` from now on waits for our stream

    // What the layer's look-up in this graph has written to its mailbox.
    bool has_arrived(int layer) const;
    int n_missing(int layer) const;
    void experts(int layer, std::vector<int32_t> & rows) const; // the expert of each row; 65,535: an id out of range
    // Ends the wait of a look-up, whose experts must be complete if it is to `go` on. False when the look-up had given
    // up waiting: the engine's kernels may then have read slots without their experts.
    bool answer(int layer, bool go);

    // The layer's table: each expert's slot, or -1. Changed in host memory, then uploaded.
    std::vector<int32_t> & table(int layer) { return tables_[layer]; }
    void upload_table(int layer); // queued on `uploads()`
    ggml_backend_t uploads() const { return uploads_.get(); }
    void upload_entry(int layer, int32_t expert); // queued on `uploads()`: the entry of one expert
    int32_t * device_table(int layer) const {
        return static_cast<int32_t *>(ggml_backend_buffer_get_base(device_tables_.get())) + first_[layer];
    }
    const expertier_device_lookup & driver() const { return driver_; }

  private:
    struct FreeBackend {
        void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
    };
    struct FreeEvent {
        void operator()(ggml_backend_event_t event) const { ggml_backend_event_free(event); }
    };

    uint32_t * mailbox(int layer) const;
    uint32_t * host_launch_params() const {
        return static_cast<uint32_t *>(ggml_backend_buffer_get_base(host_launch_params_.get()));
    }
    bool launch_copies(const CopyRow * rows, uint32_t n);
    bool launch(int layer, const void * ids, const size_t * nb, uint32_t n_used, uint32_t n_rows, void * slots,
                const SavedRows & saved);
    int32_t * host_table(int layer) const {
        return static_cast<int32_t *>(ggml_backend_buffer_get_base(host_tables_.get())) + first_[layer];
    }
    void try_out(ggml_backend_dev_t device, bool captured);

    expertier_device_lookup driver_;
    uint32_t spin_limit_;
    uint32_t graph_ = 0;
    std::vector<std::vector<int32_t>> tables_;
    std::vector<size_t> first_; // of each layer, in the tables' buffers
    size_t n_table_words_ = 0;
    std::vector<uint32_t> n_rows_; // of each layer's look-up
    std::vector<CopyRow> rows_;
    Buffer device_tables_, host_tables_, mailboxes_, device_launch_params_, host_launch_params_;
    std::unique_ptr<ggml_backend, FreeBackend> uploads_;
    std::unique_ptr<ggml_backend_event, FreeEvent> before_, after_;
};

} // namespace expertier
