// A model that the engine has loaded, with the files that it was loaded from.
#pragma once

#include "llama_host/file.h"
#include "llama_host/live.h"
#include "llama.h"

#include <vector>

struct expertier_model : expertier::Counted<expertier_model> {
    expertier::ModelFiles files;
    std::vector<float> tensor_split; // the engine keeps the pointer
    llama_model * model = nullptr;
    bool owns_model = true; // false: the caller of expertier_model_hand_over frees `model`, before this is closed
};
