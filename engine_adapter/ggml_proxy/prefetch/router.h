// A layer's router as a graph has it: all that is needed to score the layer's experts in another place.
#pragma once

#include "ggml.h"

namespace expertier {

// score = bias + matrix * norm(state), perhaps a sigmoid of that, + late_bias; the experts with the largest are used.
struct Router {
    const ggml_tensor * input = nullptr; // what its matrix is multiplied with; null: no router was found
    const ggml_tensor * state = nullptr; // the hidden state before its norm; null: no known norm
    const ggml_tensor * norm = nullptr;  // factors of the norm (RMS)
    float epsilon = 0;
    const ggml_tensor * matrix = nullptr; // [n_hidden, n_experts]
    const ggml_tensor * bias = nullptr;
    const ggml_tensor * late_bias = nullptr;
    bool is_sigmoid = false;
};

// The router that chose `ids`, the experts of each token; without an input where the router has an unknown form.
Router find_router(const ggml_tensor * ids);

} // namespace expertier
