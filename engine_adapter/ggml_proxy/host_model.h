// A model that the engine has loaded, with the file it was loaded from.
#pragma once

#include "host_file.h"
#include "llama.h"

struct expertier_model {
    expertier::SkippingFile file;
    llama_model *           model = nullptr;
};
