// Block sizes of ggml types, for tables that Python reads of files.
#pragma once

#include "ggml.h"

#include <cstdint>

namespace expertier {

// 1, and the block of a type: how many elements it holds, in how many bytes. 0: this build of ggml has no such type, or
// has it no more. ggml itself only asserts.
inline int32_t block_size(int32_t type, int64_t * elements, int64_t * n_bytes) {
    if (type < 0 || type >= GGML_TYPE_COUNT) {
        return 0;
    }
    *elements = ggml_blck_size((ggml_type) type);
    *n_bytes = (int64_t) ggml_type_size((ggml_type) type);
    return *elements > 0 && *n_bytes > 0;
}

} // namespace expertier
