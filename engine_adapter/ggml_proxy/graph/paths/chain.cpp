#include "graph/paths/chain.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>

namespace expertier {

namespace {

bool contains(const std::vector<ggml_tensor *> & nodes, const ggml_tensor * tensor) {
    return std::find(nodes.begin(), nodes.end(), tensor) != nodes.end();
}

bool reads(const ggml_tensor * node, const std::vector<ggml_tensor *> & nodes) {
    if (node->view_src && contains(nodes, node->view_src)) {
        return true;
    }
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (node->src[i] && contains(nodes, node->src[i])) {
            return true;
        }
    }
    return false;
}

// How often `nodes` read `tensor`, counted in the way that the engine counts uses.
int count_reads(const std::vector<ggml_tensor *> & nodes, const ggml_tensor * tensor) {
    int n = 0;
    for (const ggml_tensor * node : nodes) {
        n += (int) std::count(node->src, node->src + GGML_MAX_SRC, tensor);
    }
    return n;
}

// Whether `tensor` has a row for each of a token's `n_used` experts, so that rows can be computed one by one.
bool has_expert_rows(const ggml_tensor * tensor, const ExpertCall & call) {
    return tensor->type == GGML_TYPE_F32 && tensor->ne[1] == call.n_used && tensor->ne[2] == call.n_tokens &&
           tensor->ne[3] == 1 && ggml_is_contiguous(tensor) && tensor->view_src == nullptr;
}

// Whether `node` is a view of the same columns of all rows of a chain node, as gate and up are views of a fused
// gate_up.
bool is_column_view(const ggml_tensor * node, const ExpertChain & chain) {
    const ggml_tensor * rows = node->src[0];
    if (node->op != GGML_OP_VIEW || node->view_src != rows || !contains(chain.nodes, rows)) {
        return false;
    }
    return node->type == rows->type && std::equal(node->nb, node->nb + GGML_MAX_DIMS - 1, rows->nb) &&
           std::equal(node->ne + 1, node->ne + GGML_MAX_DIMS, rows->ne + 1) &&
           node->view_offs + ggml_row_size(node->type, node->ne[0]) <= rows->nb[1];
}

void add_input(ExpertChain & chain, const ggml_tensor * rows) {
    if (std::find(chain.inputs.begin(), chain.inputs.end(), rows) == chain.inputs.end()) {
        chain.inputs.push_back(rows);
    }
}

// Whether `tensor` is a weight, whose memory never changes, so that it can be read at any later time.
bool is_weight(const ggml_tensor * tensor) {
    return tensor->op == GGML_OP_NONE && tensor->buffer && tensor->buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

// Whether `node` changes the rows of `input` after `input` was computed.
bool changes(const ggml_tensor * node, const ggml_tensor * input) {
    const ggml_tensor * memory = input->view_src ? input->view_src : input;
    return node->view_src == memory && node != input && !ggml_op_is_empty(node->op);
}

// Whether `node` computes each row from the same row of chain nodes, and perhaps of factors or terms from outside,
// which become inputs of the chain.
bool is_row_wise(const ggml_tensor * node, ExpertChain & chain, const ExpertCall & call) {
    if (!(node->flags & GGML_TENSOR_FLAG_COMPUTE)) {
        return false;
    }
    int first_outside = GGML_MAX_SRC; // the first source that need not be rows of the chain
    bool takes_rows = false;          // whether the second source may be rows from outside the chain
    switch (node->op) {
    case GGML_OP_GLU:
    case GGML_OP_UNARY:
    case GGML_OP_SQR:
    case GGML_OP_SCALE:
    case GGML_OP_CLAMP:
        break;
    case GGML_OP_ADD:
    case GGML_OP_MUL:
        takes_rows = true;
        break;
    case GGML_OP_ADD_ID: // its sources are rows, the biases of all experts, and expert ids
        if (!is_weight(node->src[1]) || node->src[2] != call.ids) {
            return false;
        }
        first_outside = 1;
        break;
    default:
        return false;
    }
    if (!has_expert_rows(node, call)) {
        return false;
    }
    for (int i = 0; i < first_outside; i++) {
        const ggml_tensor * source = node->src[i];
        if (source == nullptr || contains(chain.nodes, source)) {
            continue;
        }
        if (i != 1 || !takes_rows || !has_expert_rows(source, call)) {
            return false;
        }
        add_input(chain, source);
    }
    return true;
}

} // namespace

ExpertChain find_chain(ggml_cgraph * graph, const ExpertCall & call) {
    ExpertChain chain;
    std::vector<int> indices; // where chain.nodes are in the graph
    for (int i = call.first; i <= call.last; i++) {
        ggml_tensor * node = graph->nodes[i];
        if (belongs(call, node)) {
            ggml_tensor * rows = node->src[1];
            if (!has_expert_rows(node, call)) {
                return {};
            }
            if (!contains(chain.nodes, rows)) {
                if (!ggml_is_contiguous(rows) || reads(rows, chain.nodes)) {
                    return {};
                }
                add_input(chain, rows);
            }
        } else if (!reads(node, chain.nodes)) {
            chain.others.push_back(i);
            continue;
        } else if (!is_column_view(node, chain) && !is_row_wise(node, chain, call)) {
            return {};
        }
        chain.nodes.push_back(node);
        indices.push_back(i);
    }

    // All of chain.others run before the chain, so none of them may change an input after it was computed.
    for (int i : chain.others) {
        for (const ggml_tensor * input : chain.inputs) {
            if (changes(graph->nodes[i], input)) {
                return {};
            }
        }
    }
    // Only the last node's rows are written, so no node outside the chain may read the rows of the chain's other nodes.
    // The graph may be a part of a larger one, and then only the use counts tell whether a node elsewhere reads them.
    for (size_t i = 0; i + 1 < chain.nodes.size(); i++) {
        if ((chain.nodes[i]->flags & GGML_TENSOR_FLAG_OUTPUT) ||
            count_reads(chain.nodes, chain.nodes[i]) != ggml_node_get_use_count(graph, indices[i])) {
            return {};
        }
    }
    return chain;
}

ExpertChain single_node_chain(ggml_tensor * node) { return { { node }, {}, { node->src[1] } }; }

} // namespace expertier
