// Sums of tensors over several devices, as the engine's own backends compute them (with NCCL, for instance). ggml's
// Meta backend asks the devices' registry for these functions, and adds up by copies where the registry has none.
#pragma once

#include "ggml-backend.h"

namespace expertier {

void * comm_init(ggml_backend_t * backends, size_t n_backends);
void comm_free(void * communicator);
bool comm_allreduce(void * communicator, ggml_tensor ** tensors);

} // namespace expertier
