#include "residency/placement.h"

#include "residency/errors.h"

#include <algorithm>

namespace expertier {

Placement::Placement(const expertier_binding & binding, const SlotTensors & slots) : slots_(slots) {
    for (int i = 0; i < binding.n_layers; i++) {
        Layer & layer = layers_.emplace_back();
        for (int j = 0; j < binding.layers[i].n_matrices; j++) {
            layer.names.emplace_back(binding.layers[i].matrices[j].name);
            layer.placed.push_back(0);
        }
    }
}

bool Placement::find(const ggml_tensor * tensor, MatrixRef & ref) const {
    for (size_t i = 0; i < layers_.size(); i++) {
        const Layer & layer = layers_[i];
        for (size_t j = 0; j < layer.names.size(); j++) {
            if (layer.names[j] != tensor->name) {
                continue;
            }
            const MatrixRef found{ (int) i, (int) j };
            const ggml_tensor * slots = slots_.of(found);
            if (tensor->type != slots->type || tensor->ne[0] != slots->ne[0] || tensor->ne[1] != slots->ne[1] ||
                tensor->ne[2] != slots_.n_experts(found.layer) ||
                (int64_t) tensor->nb[2] != slots_.matrix_bytes(found)) {
                set_error("the engine's tensor " + layer.names[j] + " has another type or shape than the GGUF");
                return false;
            }
            ref = found;
            return true;
        }
    }
    set_error(why_unknown(tensor));
    return false;
}

std::string Placement::why_unknown(const ggml_tensor * tensor) {
    const std::string name = tensor->name;
    return name.find(".lora_") != std::string::npos
               ? "tensor " + name +
                     " is of a LoRA adapter over experts, and the engine keeps an adapter in the buffers of the "
                     "weights that it changes: the tiers' buffers have no memory for it, so the adapter is not loaded; "
                     "use an adapter without ffn_*_exps tensors, or merge it into the model"
               : "tensor " + name +
                     " was placed among experts in the tiers, and is not an expert matrix of a model that is "
                     "being loaded into them; open the model through expertier";
}

bool Placement::has_matrix(const char * name) const {
    for (const Layer & layer : layers_) {
        if (std::find(layer.names.begin(), layer.names.end(), name) != layer.names.end()) {
            return true;
        }
    }
    return false;
}

void Placement::count(MatrixRef ref, int change) {
    std::lock_guard<std::mutex> guard(mutex_);
    layers_[ref.layer].placed[ref.matrix] += change;
}

std::string Placement::find_unplaced() {
    std::lock_guard<std::mutex> guard(mutex_);
    std::string first;
    bool is_needed = false; // this layer or a later layer has a tensor in our buffers
    for (size_t i = layers_.size(); i-- > 0;) {
        const Layer & layer = layers_[i];
        for (size_t j = layer.names.size(); j-- > 0;) {
            is_needed = is_needed || layer.placed[j] > 0;
        }
        for (size_t j = layer.names.size(); j-- > 0 && (is_needed || i == 0);) {
            if (layer.placed[j] == 0) {
                first = layer.names[j];
            }
        }
    }
    return first;
}

} // namespace expertier
