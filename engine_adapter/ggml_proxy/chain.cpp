#include "chain.h"

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

// One row of `n_used` experts a token, so that a row of it can stand alone.
bool has_expert_rows(const ggml_tensor * tensor, const ExpertCall & call) {
    return tensor->type == GGML_TYPE_F32 && tensor->ne[1] == call.n_used && tensor->ne[2] == call.n_tokens &&
           tensor->ne[3] == 1 && ggml_is_contiguous(tensor) && tensor->view_src == nullptr;
}

// Whether `node` computes each row from the same row of chain nodes alone.
bool is_row_wise(const ggml_tensor * node, const std::vector<ggml_tensor *> & chain, const ExpertCall & call) {
    int first_outside = GGML_MAX_SRC; // sources from here on need not be rows of the chain
    switch (node->op) {
        case GGML_OP_GLU:
        case GGML_OP_UNARY:
        case GGML_OP_SCALE:
        case GGML_OP_CLAMP:
        case GGML_OP_ADD:
        case GGML_OP_MUL:
            break;
        case GGML_OP_ADD_ID: // rows, biases of all experts, expert ids
            if (contains(chain, node->src[1]) || node->src[2] != call.ids) {
                return false;
            }
            first_outside = 1;
            break;
        default:
            return false;
    }
    for (int i = 0; i < first_outside; i++) {
        const ggml_tensor * source = node->src[i];
        if (source && (!contains(chain, source) || !has_expert_rows(source, call))) {
            return false;
        }
    }
    return has_expert_rows(node, call);
}

} // namespace

ExpertChain find_chain(ggml_cgraph * graph, const ExpertCall & call) {
    ExpertChain chain;
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
                if (std::find(chain.inputs.begin(), chain.inputs.end(), rows) == chain.inputs.end()) {
                    chain.inputs.push_back(rows);
                }
            }
        } else if (!reads(node, chain.nodes)) {
            chain.others.push_back(i);
            continue;
        } else if (!is_row_wise(node, chain.nodes, call)) {
            return {};
        }
        chain.nodes.push_back(node);
    }

    // Only the last node's rows are written: nobody else may look at the others'.
    std::vector<ggml_tensor *> inner(chain.nodes.begin(), chain.nodes.end() - 1);
    for (const ggml_tensor * node : inner) {
        if (node->flags & GGML_TENSOR_FLAG_OUTPUT) {
            return {};
        }
    }
    for (int i = call.last + 1; i < graph->n_nodes; i++) {
        if (reads(graph->nodes[i], inner)) {
            return {};
        }
    }
    return chain;
}

ExpertChain single_node_chain(ggml_tensor * node) { return { { node }, {}, { node->src[1] } }; }

} // namespace expertier
