// Nodes that compute nothing. One is put before a segment to make the inner backend take the segment for a new graph,
// so no two of these nodes are alike.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <deque>

namespace expertier {

class LeadingNodes {
  public:
    // The node to put before the segment of number `segment`, which begins with the node `first`.
    ggml_tensor * next(size_t segment, const ggml_tensor * first);

  private:
    std::deque<ggml_tensor> nodes_; // a deque keeps their addresses: backends know a graph by its first node's address
    int32_t n_ = 0;
};

} // namespace expertier
