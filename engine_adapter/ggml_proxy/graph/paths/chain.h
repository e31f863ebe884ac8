// A layer's expert nodes with the row-wise nodes between them, if the rows of a group of experts can run through all of
// these nodes.
#pragma once

#include "graph/expert_call.h"

#include <vector>

namespace expertier {

struct ExpertChain {
    std::vector<ggml_tensor *> nodes; // in graph order; only the last node is read outside the chain
    std::vector<int> others;          // graph indices of nodes that lie between `nodes` and do not depend on them
    std::vector<const ggml_tensor *> inputs; // rows that `nodes` read from outside; `others` may compute some of them
};

// The chain of `call`; `nodes` is empty when a node between the expert nodes cannot run on gathered rows, or is read
// outside the chain. With a whole chain an expert is fetched once for the call; node by node it is fetched once for
// each matrix.
ExpertChain find_chain(ggml_cgraph * graph, const ExpertCall & call);

// The chain of one expert node alone, which every node allows.
ExpertChain single_node_chain(ggml_tensor * node);

} // namespace expertier
