// Compute buffers in the slab. To ggml and the inner backend, such a buffer is a buffer of the inner type at an address
// in the slab. It shares the slab's own context, by which the backend finds its memory, and does not free the slab when
// it is freed.
#pragma once

#include "slab/compute_region.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <memory>

struct ggml_cgraph;

namespace expertier {

// A buffer of `size` bytes in the region; null when the region has no place for it.
ggml_backend_buffer_t new_compute_buffer(std::shared_ptr<ComputeRegion> region, size_t size);

// Computes something small in the region on `device`; throws std::runtime_error when the result is wrong.
void try_out(const std::shared_ptr<ComputeRegion> & region, ggml_backend_dev_t device);

bool is_compute_buffer(ggml_backend_buffer_t buffer);

// The buffer that the inner backend allocated: the slab for a compute buffer, and any other buffer itself. Backends
// that recognise their own buffers by the address of a function must be given this buffer.
ggml_backend_buffer_t real_buffer(ggml_backend_buffer_t buffer);

// The same bytes as a tensor in the real buffer, without a graph.
ggml_tensor in_real_buffer(const ggml_tensor * tensor);

// Whether something may be written to `tensor` now. If `tensor` lies in a compute buffer, this has the slots leave the
// buffer's part of the slab. Where the slots cannot leave it, nothing may be written, and the graph will fail.
bool may_write(const ggml_tensor * tensor);

// To be called before a graph runs: has the slots leave the slab's part that the graph computes in, and lets the
// boundary go down where that pays. False, with the thread's error set, when the graph must not run.
bool make_room(const ggml_cgraph * graph);

} // namespace expertier
