// One MUL_MAT_ID on a device with the expert tensor in a buffer type: the smallest graph that goes through the proxy.

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "llama_host/abi.h"

#include <cstdio>
#include <memory>
#include <string>

namespace {

template <auto Free> struct Deleter {
    template <typename T> void operator()(T * object) const { Free(object); }
};
using Context = std::unique_ptr<ggml_context, Deleter<ggml_free>>;
using Buffer = std::unique_ptr<ggml_backend_buffer, Deleter<ggml_backend_buffer_free>>;
using Backend = std::unique_ptr<ggml_backend, Deleter<ggml_backend_free>>;

} // namespace

// Computes out[n_tokens][n_used][ne1] from F32 experts [n_experts][ne1][ne0] named `name`, x[n_tokens][ne0] and
// ids[n_tokens][n_used]. Returns 0, or ggml's status when that is an error, 100 when the backend or its memory could
// not be made, or 101 when the proxy did not restore the graph.
EXPERTIER_EXPORT int32_t expertier_host_mul_mat_id(void * device, void * experts_type, const char * name, int64_t ne0,
                                                   int64_t ne1, int64_t n_experts, const float * x, const int32_t * ids,
                                                   int64_t n_used, int64_t n_tokens, float * out) {
    constexpr int32_t not_made = 100, not_restored = 101;

    Backend backend(ggml_backend_dev_init(static_cast<ggml_backend_dev_t>(device), nullptr));
    Context weights(ggml_init({ 2 * ggml_tensor_overhead(), nullptr, true }));
    Context graph_memory(ggml_init({ 8 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
    if (!backend || !weights || !graph_memory) {
        return not_made;
    }
    ggml_tensor * experts = ggml_new_tensor_3d(weights.get(), GGML_TYPE_F32, ne0, ne1, n_experts);
    ggml_set_name(experts, name);
    Buffer experts_buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(weights.get(), static_cast<ggml_backend_buffer_type_t>(experts_type)));
    if (!experts_buffer) {
        return not_made;
    }
    ggml_backend_buffer_set_usage(experts_buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);

    ggml_tensor * rows = ggml_new_tensor_3d(graph_memory.get(), GGML_TYPE_F32, ne0, 1, n_tokens);
    ggml_tensor * chosen = ggml_new_tensor_2d(graph_memory.get(), GGML_TYPE_I32, n_used, n_tokens);
    ggml_tensor * result = ggml_mul_mat_id(graph_memory.get(), experts, rows, chosen);
    Buffer values(ggml_backend_alloc_ctx_tensors(graph_memory.get(), backend.get()));
    if (!values) {
        return not_made;
    }
    ggml_cgraph * graph = ggml_new_graph(graph_memory.get());
    ggml_build_forward_expand(graph, result);
    ggml_backend_tensor_set(rows, x, 0, ggml_nbytes(rows));
    ggml_backend_tensor_set(chosen, ids, 0, ggml_nbytes(chosen));
    const ggml_status status = ggml_backend_graph_compute(backend.get(), graph);
    if (result->src[0] != experts || result->src[1] != rows || result->src[2] != chosen) {
        return not_restored;
    }
    if (status != GGML_STATUS_SUCCESS) {
        return status;
    }
    ggml_backend_tensor_get(result, out, 0, ggml_nbytes(result));
    return 0;
}
