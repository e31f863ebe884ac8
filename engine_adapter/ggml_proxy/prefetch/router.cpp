#include "prefetch/router.h"

#include "ggml-backend.h"

#include <cstring>

namespace expertier {

namespace {

const ggml_tensor * through_views(const ggml_tensor * tensor) {
    while (tensor && (tensor->op == GGML_OP_VIEW || tensor->op == GGML_OP_RESHAPE)) {
        tensor = tensor->src[0];
    }
    return tensor;
}

bool is_on_device(const ggml_tensor * tensor) {
    const ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    return tensor->data && buffer && !ggml_backend_buffer_is_host(buffer);
}

// Whether it is `n` floats of the model, one after another.
bool is_vector(const ggml_tensor * tensor, int64_t n) {
    return tensor && tensor->op == GGML_OP_NONE && tensor->type == GGML_TYPE_F32 && ggml_nelements(tensor) == n &&
           ggml_is_contiguous(tensor) && is_on_device(tensor);
}

bool is_state(const ggml_tensor * tensor, int64_t n_hidden) {
    return tensor->type == GGML_TYPE_F32 && tensor->nb[0] == sizeof(float) && tensor->ne[0] == n_hidden &&
           tensor->ne[2] == 1 && tensor->ne[3] == 1 && is_on_device(tensor);
}

bool is_matrix(const ggml_tensor * tensor) {
    return (tensor->type == GGML_TYPE_F32 || tensor->type == GGML_TYPE_F16 || tensor->type == GGML_TYPE_BF16) &&
           tensor->op == GGML_OP_NONE && tensor->ne[2] == 1 && tensor->ne[3] == 1 &&
           tensor->nb[0] == ggml_type_size(tensor->type) && is_on_device(tensor);
}

// Follows scores back to the product that they come from; null where something else is on the way.
const ggml_tensor * find_product(const ggml_tensor * scores, Router & router) {
    const int64_t n_experts = scores->ne[0];
    bool squashed = false;
    while ((scores = through_views(scores))) {
        switch (scores->op) {
        case GGML_OP_MUL_MAT:
            return scores;
        case GGML_OP_ADD:
            if (!is_vector(scores->src[1], n_experts) || router.bias) {
                return nullptr;
            }
            router.bias = scores->src[1];
            break;
        case GGML_OP_SOFT_MAX: // keeps the order
            if (router.bias || squashed) {
                return nullptr;
            }
            squashed = true;
            break;
        case GGML_OP_UNARY:
            if (ggml_get_unary_op(scores) != GGML_UNARY_OP_SIGMOID || squashed) {
                return nullptr;
            }
            squashed = true;
            router.is_sigmoid = true;
            router.late_bias = router.bias;
            router.bias = nullptr;
            break;
        default:
            return nullptr;
        }
        scores = scores->src[0];
    }
    return nullptr;
}

} // namespace

Router find_router(const ggml_tensor * ids) {
    Router router;
    const ggml_tensor * sorted = through_views(ids);
    if (!sorted || (sorted->op != GGML_OP_ARGSORT && strcmp(ggml_op_name(sorted->op), "TOP_K") != 0)) {
        return {};
    }
    const ggml_tensor * product = find_product(sorted->src[0], router);
    if (!product || !is_matrix(product->src[0]) || !is_state(product->src[1], product->src[0]->ne[0])) {
        return {};
    }
    router.matrix = product->src[0];
    router.input = product->src[1];
    const int64_t n_hidden = router.matrix->ne[0];
    const ggml_tensor * scaled = through_views(router.input);
    if (scaled && scaled->op == GGML_OP_MUL && scaled->src[0]->op == GGML_OP_RMS_NORM &&
        is_vector(scaled->src[1], n_hidden) && is_state(scaled->src[0]->src[0], n_hidden)) {
        router.state = scaled->src[0]->src[0];
        router.norm = scaled->src[1];
        memcpy(&router.epsilon, scaled->src[0]->op_params, sizeof(float));
    }
    return router;
}

} // namespace expertier
