// A layer's expert nodes with the row-wise nodes between them, when a group of experts can run through all of them.
#pragma once

#include "graph/expert_call.h"

#include <vector>

namespace expertier {

struct ExpertChain {
    std::vector<ggml_tensor *> nodes;        // in graph order; the last is the only one that others read
    std::vector<int> others;                 // graph indices between them that do not depend on them
    std::vector<const ggml_tensor *> inputs; // rows that the nodes take from outside; some of `others` may make them
};

// The chain of `call`; empty `nodes` when some node between cannot run on gathered rows, or is read from outside.
// Gathering a whole chain fetches an expert once a call; node by node it would be fetched once a matrix.
ExpertChain find_chain(ggml_cgraph * graph, const ExpertCall & call);

// The chain of one expert node alone: always possible.
ExpertChain single_node_chain(ggml_tensor * node);

} // namespace expertier
