// The block sizes of the engine's types.

#include "abi/block_size.h"
#include "llama_host/abi.h"

EXPERTIER_EXPORT int32_t expertier_host_block_size(int32_t type, int64_t * elements, int64_t * n_bytes) {
    return expertier::block_size(type, elements, n_bytes);
}
