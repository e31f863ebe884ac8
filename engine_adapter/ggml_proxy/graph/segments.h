// Hands a graph to the inner backend segment by segment, with expert nodes redirected to where their experts are.
#pragma once

#include "backend/backend.h"

#include <cstdint>
#include <vector>

namespace expertier {

// The engine's number of a graph, the same for graphs that are alike; 0 where this release of the engine has no
// numbers.
uint64_t graph_uid(const ggml_cgraph * graph);

// A hash of both numbers.
uint64_t mixed(uint64_t a, uint64_t b);

class GraphSegments {
  public:
    GraphSegments(ProxyBackend & backend, ggml_cgraph * graph) : backend_(backend), graph_(graph) {}
    ~GraphSegments(); // the engine gets its graph back as it was
    GraphSegments(const GraphSegments &) = delete;
    GraphSegments & operator=(const GraphSegments &) = delete;

    // Queues the nodes before `end` that have not been queued.
    ggml_status run_until(int end);
    // From here on, the inner backend takes every segment for a new graph and queues its kernels one by one. A capture
    // needs that: for a segment that it knows, CUDA's backend would launch or make a graph of its own.
    void run_afresh(LeadingNodes & nodes) { leading_ = &nodes; }
    // Has `node`, which has not been queued, multiply by `experts` as `ids` choose.
    void redirect(ggml_tensor * node, ggml_tensor * experts, ggml_tensor * ids);
    // Leaves out the nodes before `end`, which a layer path has run by itself.
    void skip_to(int end) { next_ = end; }

    int next() const { return next_; }
    int n_segments() const { return n_segments_; }

  private:
    struct Redirected {
        ggml_tensor * node;
        ggml_tensor * experts;
        ggml_tensor * ids;
    };

    ProxyBackend & backend_;
    ggml_cgraph * graph_;
    int next_ = 0; // the first node that has not been handed to the inner backend
    int n_segments_ = 0;
    LeadingNodes * leading_ = nullptr;
    uint64_t placed_ = 0; // a hash of where the experts of the segments are
    std::vector<Redirected> redirected_;
};

} // namespace expertier
