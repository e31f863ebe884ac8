// The buffer type of expert tensors. Its buffers are address space without memory: the bytes are in the tiers.
#pragma once

#include "residency/tiers.h"

#include <memory>
#include <string>

namespace expertier {

// An expert tensor that the engine made, and where its bytes really are.
struct ExpertTensor {
    std::shared_ptr<Tiers> tiers;
    MatrixRef ref;
};

// Fills in a buffer type of this kind, named `name`, on the naming device `device`.
void init_expert_buffer_type(ggml_backend_buffer_type_t type, ggml_backend_dev_t device, const char * name);

bool is_expert_buffer_type(ggml_backend_buffer_type_t type);

// The tiers that buffers allocated by this thread belong to, while it loads a model: of a model on several devices one
// for each, told apart by the buffer type. Null: none any more.
void add_loading_tiers(std::shared_ptr<Tiers> tiers);

// The tiers of buffers that the engine's own threads allocate, for hosts that load one model by themselves.
void add_default_tiers(std::shared_ptr<Tiers> tiers);

// Why a tool's model cannot be served: options of the tool's have placed it otherwise than we did. Empty: it can be.
std::string find_misplacement(const ggml_cgraph * graph);

// What `tensor` stands for; null when it does not lie directly in an expert buffer.
const ExpertTensor * find_expert_tensor(const ggml_tensor * tensor);

// Whether `tensor`, or what it is a view of, lies in an expert buffer: no backend can get its bytes by their address.
bool is_expert_memory(const ggml_tensor * tensor);

// Whether `op` only names memory: nothing is read or written.
bool is_view_op(const ggml_tensor * op);

// The source of `op` that is an expert tensor, or a part of one, whose bytes `op` cannot get: they are in the slots,
// and only MUL_MAT_ID on a full tensor is redirected to them. Null when there is none.
const ggml_tensor * find_unserved_source(const ggml_tensor * op);

} // namespace expertier
