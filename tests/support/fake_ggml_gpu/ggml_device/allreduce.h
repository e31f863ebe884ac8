// Sums of tensors over several devices, as CUDA's backend has them for ggml's Meta backend.
#pragma once

#include "ggml-backend.h"

namespace fake_gpu {

// Null, as CUDA's, where one of the backends is another's: an engine then adds by copies.
void * comm_init(ggml_backend_t * backends, size_t n_backends);
void comm_free(void * communicator);
bool comm_allreduce(void * communicator, ggml_tensor ** tensors);

} // namespace fake_gpu
