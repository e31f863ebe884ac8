#include "graph/leading_nodes.h"

#include <algorithm>

namespace expertier {

ggml_tensor * LeadingNodes::next(size_t segment, const ggml_tensor * first) {
    while (nodes_.size() <= segment) {
        nodes_.emplace_back();
    }
    ggml_tensor & node = nodes_[segment];
    node = {};
    node.op = GGML_OP_NONE;
    node.type = first->type;
    node.buffer = first->buffer;
    node.data = first->data;
    std::copy_n(first->ne, GGML_MAX_DIMS, node.ne);
    std::copy_n(first->nb, GGML_MAX_DIMS, node.nb);
    node.op_params[0] = ++n_;
    return &node;
}

} // namespace expertier
