// The buffer type of expert tensors. Its buffers are address space without memory, because the bytes are in the tiers.
#pragma once

#include "residency/tiers.h"

#include <memory>
#include <string>

namespace expertier {

// An expert tensor that the engine made, and the matrix of the tiers that it stands for.
struct ExpertTensor {
    std::shared_ptr<Tiers> tiers;
    MatrixRef ref;
};

// Fills in a buffer type of this kind, named `name`, on the naming device `device`.
void init_expert_buffer_type(ggml_backend_buffer_type_t type, ggml_backend_dev_t device, const char * name);

bool is_expert_buffer_type(ggml_backend_buffer_type_t type);

// Adds the tiers that buffers belong to which this thread allocates while it loads a model. A model on several devices
// has tiers for each device, told apart by the buffer type. Null removes all of them.
void add_loading_tiers(std::shared_ptr<Tiers> tiers);

// Adds the tiers of buffers that any other thread allocates, for hosts that load one model by themselves. Null removes
// all of them.
void add_default_tiers(std::shared_ptr<Tiers> tiers);

// Why the tiers cannot serve the model of a tool (`expertier exec`): the tool's options have placed expert tensors
// elsewhere than in expert buffers, or the tool has loaded another model. Empty where the tiers can serve it.
std::string find_misplacement(const ggml_cgraph * graph);

// What `tensor` stands for; null when it does not lie directly in an expert buffer.
const ExpertTensor * find_expert_tensor(const ggml_tensor * tensor);

// Whether `tensor`, or the tensor that it is a view of, lies in an expert buffer: no backend can read it by its
// address.
bool is_expert_memory(const ggml_tensor * tensor);

// The source of `op` that is an expert tensor, or a part of one, and that `op` cannot read: its bytes are in the slots,
// and only MUL_MAT_ID on a full tensor is redirected to the slots. Null when there is none.
const ggml_tensor * find_unserved_source(const ggml_tensor * op);

} // namespace expertier
