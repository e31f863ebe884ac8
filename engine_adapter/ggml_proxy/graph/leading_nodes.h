// Nodes that compute nothing, one before each segment that is to be new to the inner backend: never the same twice.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <deque>

namespace expertier {

class LeadingNodes {
  public:
    // For the segment that begins with `first`.
    ggml_tensor * next(size_t segment, const ggml_tensor * first);

  private:
    std::deque<ggml_tensor> nodes_; // at addresses that stay: backends know a graph by its first node's
    int32_t n_ = 0;
};

} // namespace expertier
