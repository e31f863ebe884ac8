// A layer's router as it stands in a graph: what it takes to score the layer's experts somewhere else.
#pragma once

#include "ggml.h"

namespace expertier {

// score = bias + matrix * norm(state), perhaps a sigmoid of that, + late_bias; the experts with the largest are used.
struct Router {
    const ggml_tensor * input = nullptr; // what its matrix is multiplied with; null: no router was found
    const ggml_tensor * state = nullptr; // that before its norm; null: there is no norm that is known here
    const ggml_tensor * norm = nullptr;  // factors of the norm (RMS)
    float epsilon = 0;
    const ggml_tensor * matrix = nullptr; // [n_hidden, n_experts]
    const ggml_tensor * bias = nullptr;
    const ggml_tensor * late_bias = nullptr;
    bool is_sigmoid = false;
};

// The router that `ids`, the experts of each token, come from; one without an input where it is none of the usual form.
Router find_router(const ggml_tensor * ids);

} // namespace expertier
