// The slots of each layer as tensors over the slab: a 3-d tensor for each matrix, indexed by slots instead of experts.
#pragma once

#include "abi/abi.h"
#include "backend/device_memory.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <atomic>
#include <deque>
#include <memory>
#include <vector>

namespace expertier {

struct MatrixRef {
    int layer = -1;
    int matrix = -1;
};

class SlotTensors {
  public:
    // Throws std::runtime_error when `device` cannot use the slab, or cannot multiply by one of the matrices.
    SlotTensors(const expertier_binding & binding, ggml_backend_dev_t device);
    SlotTensors(const SlotTensors &) = delete;
    SlotTensors & operator=(const SlotTensors &) = delete;

    int n_layers() const { return (int) layers_.size(); }
    int n_slots(int layer) const { return layers_[layer].n_slots; }
    int n_experts(int layer) const { return layers_[layer].n_experts; }

    ggml_tensor * of(MatrixRef ref) const { return layers_[ref.layer].tensors[ref.matrix]; }
    // The pieces in which an expert's bytes are copied.
    const std::vector<expertier_copy> & copies(int layer) const { return layers_[layer].copies; }
    ggml_tensor piece(int32_t slot, const expertier_copy & copy) const; // this piece of the slot, as bytes
    int64_t matrix_bytes(MatrixRef ref) const { return layers_[ref.layer].matrix_bytes[ref.matrix]; } // of one expert
    int64_t expert_bytes(int layer) const; // of one expert, all of its matrices together
    void fill_with_zeros(int layer, int32_t slot);

    // Takes over from the binding where the slots lie now; with no graph running. Each call changes the epoch.
    void take_layout(const expertier_binding & binding);
    int epoch() const { return epoch_; }

    ggml_backend_buffer_t slab() const { return slab_; }
    void * slab_base() const { return slab_base_; }
    bool is_host_memory() const { return wrapped_slab_ != nullptr; }

  private:
    struct Layer {
        int32_t n_experts = 0;
        int32_t n_slots = 0;
        std::vector<int64_t> matrix_bytes;
        std::vector<expertier_copy> copies;
        std::vector<ggml_tensor *> tensors;
    };
    struct FreeContext {
        void operator()(ggml_context * context) const { ggml_free(context); }
    };

    std::deque<Layer> layers_;
    std::unique_ptr<ggml_context, FreeContext> context_;
    Buffer wrapped_slab_; // the slab as a buffer of ggml's, where the slab is host memory
    ggml_backend_buffer_t slab_ = nullptr;
    void * slab_base_;
    std::atomic<int> epoch_{ 0 };
};

} // namespace expertier
