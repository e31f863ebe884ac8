// Compute buffers in the slab: to ggml and the inner backend they are buffers of the inner type, at an address in the
// slab. They share the slab's own context, by which the backend finds its memory, and leave the slab alone when freed.
#pragma once

#include "slab/compute_region.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <memory>

struct ggml_cgraph;

namespace expertier {

// A buffer of `size` bytes in the region; null when it has no place for it.
ggml_backend_buffer_t new_compute_buffer(std::shared_ptr<ComputeRegion> region, size_t size);

// Computes something small in the region on `device`; throws std::runtime_error where that does not give what it
// should.
void try_out(const std::shared_ptr<ComputeRegion> & region, ggml_backend_dev_t device);

bool is_compute_buffer(ggml_backend_buffer_t buffer);

// The buffer that the inner backend allocated: the slab for a compute buffer, any other as it is. Where backends look
// for their own buffers by the address of a function, they have to be given that.
ggml_backend_buffer_t real_buffer(ggml_backend_buffer_t buffer);

// The same bytes as a tensor in the real buffer, without a graph.
ggml_tensor in_real_buffer(const ggml_tensor * tensor);

// Before something is written to `tensor`: whether it may be. Of a compute buffer, the slots leave its part of the
// slab. Where they cannot, nothing is to be written, and the graph will fail.
bool may_write(const ggml_tensor * tensor);

// Before a graph runs: the same for all that it computes, and a chance for the boundary to go down. False, and the
// tiers' error set, when it must not run.
bool make_room(const ggml_cgraph * graph);

} // namespace expertier
