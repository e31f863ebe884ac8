// How llama.cpp divides a tensor among the devices of a tensor split. Shared by the proxy, the host library and Python.
#pragma once

#include <cstdint>

#define EXPERTIER_MAX_SEGMENTS 16
#define EXPERTIER_MAX_SPLIT_DEVICES 16
#define EXPERTIER_NOT_LOADED (-1) // instead of an axis: the engine did not load the tensor

// A tensor that may be split, as the GGUF has it.
struct expertier_full_tensor {
    const char * name;
    int32_t type; // ggml_type
    int64_t ne[4];
};

// Along `axis` a tensor consists of segments. Each segment occurs `repeats[segment]` times in a row, and of each
// occurrence device `d` of `n` gets the next `ne[segment * n + d]` elements. An axis of 10 (mirrored) gives every
// device the full tensor.
struct expertier_split {
    int32_t axis;
    int32_t n_segments;
    uint32_t repeats[EXPERTIER_MAX_SEGMENTS];
    int64_t ne[EXPERTIER_MAX_SEGMENTS * EXPERTIER_MAX_SPLIT_DEVICES];
};
