#include "residency/slot_tensors.h"

#include "abi/block_size.h"
#include "ggml-backend-impl.h"

#include <numeric>
#include <stdexcept>
#include <string>

namespace expertier {

namespace {

// Throws when this build of ggml has no type of this number, or a type of another size than the expert table assumed.
void require_type(const expertier_matrix & matrix) {
    int64_t elements, n_bytes;
    if (!block_size(matrix.type, &elements, &n_bytes)) {
        throw std::runtime_error(std::string("this llama.cpp has no ggml type ") + std::to_string(matrix.type) +
                                 ", which is the type of " + matrix.name + ": use a newer llama.cpp");
    }
    const int64_t expert_bytes = matrix.ne0 / elements * n_bytes * matrix.ne1;
    if (matrix.ne0 % elements != 0 || expert_bytes != (int64_t) matrix.expert_bytes) {
        throw std::runtime_error(std::string("an expert of ") + matrix.name + " takes " +
                                 std::to_string(matrix.expert_bytes) + " bytes by the gguf package and " +
                                 std::to_string(expert_bytes) +
                                 " by this llama.cpp: install the gguf package that belongs to it");
    }
}

// Throws when `inner` cannot multiply by the slots of a matrix, because of the type or of a stride that leaves gaps.
void require_support(ggml_backend_dev_t inner, ggml_tensor * slots) {
    std::unique_ptr<ggml_context, decltype(&ggml_free)> scope(ggml_init({ 4 * ggml_tensor_overhead(), nullptr, true }),
                                                              &ggml_free);
    ggml_tensor * rows = ggml_new_tensor_3d(scope.get(), GGML_TYPE_F32, slots->ne[0], 1, 1);
    ggml_tensor * ids = ggml_new_tensor_2d(scope.get(), GGML_TYPE_I32, 1, 1);
    ggml_tensor * product = ggml_mul_mat_id(scope.get(), slots, rows, ids);
    if (!ggml_backend_dev_supports_op(inner, product)) {
        throw std::runtime_error(std::string("it cannot run MUL_MAT_ID on ") + slots->name + " of type " +
                                 ggml_type_name(slots->type));
    }
}

} // namespace

SlotTensors::SlotTensors(const expertier_binding & binding, ggml_backend_dev_t device) : slab_base_(binding.slab_base) {
    const DevicePlace place = find_device_place(binding.slab_base);
    slab_ = place.buffer;
    if (slab_ != nullptr) {
        slab_base_ = place.data;
    } else {
        if (device->iface.buffer_from_host_ptr == nullptr) {
            throw std::runtime_error("it takes no host pointers, so it cannot use a slab in host memory");
        }
        wrapped_slab_.reset(
            ggml_backend_dev_buffer_from_host_ptr(device, binding.slab_base, binding.slab_bytes, binding.slab_bytes));
        if (!wrapped_slab_) {
            throw std::runtime_error("it refused the slab's memory");
        }
        ggml_backend_buffer_set_usage(wrapped_slab_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        slab_ = wrapped_slab_.get();
    }

    size_t n_matrices = 0;
    for (int i = 0; i < binding.n_layers; i++) {
        n_matrices += binding.layers[i].n_matrices;
    }
    context_.reset(ggml_init({ (n_matrices + 1) * ggml_tensor_overhead(), nullptr, true }));

    for (int i = 0; i < binding.n_layers; i++) {
        const expertier_layer & from = binding.layers[i];
        Layer & layer = layers_.emplace_back();
        layer.n_experts = from.n_experts;
        layer.n_slots = from.n_slots;
        layer.copies.assign(from.copies, from.copies + from.n_copies);
        for (int j = 0; j < from.n_matrices; j++) {
            const expertier_matrix & matrix = from.matrices[j];
            require_type(matrix);
            ggml_tensor * tensor =
                ggml_new_tensor_3d(context_.get(), (ggml_type) matrix.type, matrix.ne0, matrix.ne1, from.n_slots);
            layer.matrix_bytes.push_back(tensor->nb[2]);
            tensor->nb[2] = matrix.stride;
            tensor->nb[3] = matrix.stride * from.n_slots;
            tensor->data = static_cast<char *>(slab_base_) + matrix.offset;
            tensor->buffer = slab_;
            ggml_format_name(tensor, "%s.slots", matrix.name);
            layer.tensors.push_back(tensor);
            require_support(device, tensor);
        }
    }
}

int64_t SlotTensors::expert_bytes(int layer) const {
    const std::vector<expertier_copy> & pieces = copies(layer);
    return std::accumulate(pieces.begin(), pieces.end(), (int64_t) 0,
                           [](int64_t sum, const expertier_copy & piece) { return sum + (int64_t) piece.n_bytes; });
}

ggml_tensor SlotTensors::piece(int32_t slot, const expertier_copy & copy) const {
    return bytes_at(slab_, static_cast<char *>(slab_base_) + copy.offset + slot * copy.stride, copy.n_bytes);
}

void SlotTensors::fill_with_zeros(int layer, int32_t slot) {
    for (size_t j = 0; j < layers_[layer].tensors.size(); j++) {
        ggml_tensor * matrix = layers_[layer].tensors[j];
        ggml_backend_tensor_memset(matrix, 0, slot * matrix->nb[2], layers_[layer].matrix_bytes[j]);
    }
}

void SlotTensors::take_layout(const expertier_binding & binding) {
    for (size_t i = 0; i < layers_.size(); i++) {
        const expertier_layer & from = binding.layers[i];
        Layer & layer = layers_[i];
        layer.n_slots = from.n_slots;
        layer.copies.assign(from.copies, from.copies + from.n_copies);
        for (size_t j = 0; j < layer.tensors.size(); j++) {
            ggml_tensor * slots = layer.tensors[j];
            slots->ne[2] = from.n_slots;
            slots->nb[3] = slots->nb[2] * from.n_slots;
            slots->data = static_cast<char *>(slab_base_) + from.matrices[j].offset;
        }
    }
    epoch_ += 1;
}

} // namespace expertier
