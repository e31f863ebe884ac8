#include "backend/wrapper_type.h"

#include "slab/compute_buffer.h"
#include "backend/device.h"

#include "ggml-impl.h"

#include <cstring>

namespace expertier {

namespace {

// ggml's allocator keeps the layout of a wide graph for a narrow one, so that the narrow graph needs as much of the
// slab as the wide one. The allocator makes a new layout when a tensor asks for more bytes than the layout gives it. So
// one input of a narrow graph asks for more bytes than it has in any wide graph.
constexpr size_t sentinel_bytes = size_t{ 256 } * 1024;
constexpr int64_t narrow_tokens = 32;

// Inputs with a number for each token, by the engine's names. The scheduler's copy of an input on our device has a name
// that contains the input's name.
constexpr const char * token_inputs[] = { "#inp_pos#", "#attn_inp_k_idxs#" };

ProxyDevice & self(ggml_backend_buffer_type_t type) { return *static_cast<ProxyDevice *>(type->context); }

ggml_backend_buffer_type_t inner(ggml_backend_buffer_type_t type) { return own_buffer_type(self(type).inner); }

const char * get_name(ggml_backend_buffer_type_t type) { return ggml_backend_buft_name(inner(type)); }
size_t get_alignment(ggml_backend_buffer_type_t type) { return ggml_backend_buft_get_alignment(inner(type)); }
bool is_host(ggml_backend_buffer_type_t type) { return ggml_backend_buft_is_host(inner(type)); }

bool is_sentinel(const ggml_tensor * tensor) {
    if (tensor->op != GGML_OP_NONE || tensor->view_src || tensor->ne[0] > narrow_tokens || ggml_nrows(tensor) != 1) {
        return false;
    }
    for (const char * name : token_inputs) {
        if (strstr(tensor->name, name)) {
            return true;
        }
    }
    return false;
}

size_t get_alloc_size(ggml_backend_buffer_type_t type, const ggml_tensor * tensor) {
    const size_t size = ggml_backend_buft_get_alloc_size(inner(type), tensor);
    return is_sentinel(tensor) && self(type).has_regions() ? size + sentinel_bytes : size;
}

// Weights and caches come through alloc_buffer_n, so a buffer that is asked for here is a compute buffer.
ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    const LookupExclusion::DeviceWait wait(self(type).lookup_exclusion);
    const auto regions = self(type).compute_regions();
    for (const std::shared_ptr<ComputeRegion> & region : regions) {
        if (ggml_backend_buffer_t buffer = new_compute_buffer(region, size)) {
            return buffer;
        }
    }
    if (!regions.empty()) {
        GGML_LOG_WARN("%s: the slab has no place for a compute buffer of %.2f MiB beside one expert slot for each "
                      "layer, so the buffer is allocated outside of the slab\n",
                      self(type).name.c_str(), (double) size / 1024.0 / 1024.0);
    }
    return ggml_backend_buft_alloc_buffer(inner(type), size);
}

// Not every release has alloc_buffer_n, the call for the buffers of weights and caches. These are templates, so that
// the code compiles where the member does not exist.
template <typename T> auto pass_many_through(T & iface, int) -> decltype(iface.alloc_buffer_n, bool()) {
    iface.alloc_buffer_n = [](ggml_backend_buffer_type_t type, auto * tensors, int n_tensors) {
        const LookupExclusion::DeviceWait wait(self(type).lookup_exclusion);
        return ggml_backend_buft_alloc_buffer_n(inner(type), tensors, n_tensors);
    };
    iface.get_alloc_size_n = [](ggml_backend_buffer_type_t type, auto * tensors, int n_tensors) {
        return ggml_backend_buft_get_alloc_size_n(inner(type), tensors, n_tensors);
    };
    return true;
}
template <typename T> bool pass_many_through(T &, long) { return false; }

} // namespace

bool can_wrap() {
    ggml_backend_buffer_type_i iface = {};
    return pass_many_through(iface, 0);
}

void init_wrapper_type(ggml_backend_buffer_type_t type, ProxyDevice & device) {
    ggml_backend_buffer_type_i iface = {};
    iface.get_name = get_name;
    iface.alloc_buffer = alloc_buffer;
    iface.get_alignment = get_alignment;
    iface.get_alloc_size = get_alloc_size;
    iface.is_host = is_host;
    pass_many_through(iface, 0);
    *type = { iface, &device.compute, &device };
}

} // namespace expertier
