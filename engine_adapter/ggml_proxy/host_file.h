// A read-only FILE over a model file that never reads given ranges: the loader gets whatever was in its buffer.
#pragma once

#include "host_abi.h"

#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

namespace expertier {

struct SkippingFile {
    int                                      descriptor = -1;
    int64_t                                  size       = 0;
    int64_t                                  position   = 0;
    std::vector<std::pair<int64_t, int64_t>> skip; // [begin, end), ascending and disjoint
    int64_t                                  bytes_read   = 0;
    int64_t                                  expert_bytes = 0; // bytes really read inside `skip`
};

// Opens `path`; null with errno set when that fails, ESTALE when it is not the file of `identity`. `file` must
// outlive the stream. Closing the stream closes the descriptor.
FILE * open_skipping(SkippingFile & file, const char * path, const expertier_file_identity & identity);

} // namespace expertier
