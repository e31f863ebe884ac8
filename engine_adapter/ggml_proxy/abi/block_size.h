// Block sizes of ggml types, for the expert tables that Python reads from model files.
#pragma once

#include "ggml.h"

#include <cstdint>

namespace expertier {

// Writes how many elements a block of a type holds and how many bytes it takes, and returns 1. Returns 0 where this
// build of ggml does not have the type, or has removed it; ggml itself would abort.
inline int32_t block_size(int32_t type, int64_t * elements, int64_t * n_bytes) {
    if (type < 0 || type >= GGML_TYPE_COUNT) {
        return 0;
    }
    *elements = ggml_blck_size((ggml_type) type);
    *n_bytes = (int64_t) ggml_type_size((ggml_type) type);
    return *elements > 0 && *n_bytes > 0;
}

} // namespace expertier
