// Serves a layer call that has more distinct experts than the layer has slots: it runs in passes, one for each group of
// experts that fits, over the gathered rows of the group.
#pragma once

#include "graph/layer_path.h"
#include "graph/segments.h"

namespace expertier {

class PassesPath : public LayerPath {
  public:
    PassesPath(ProxyBackend & backend, ggml_cgraph * graph, GraphSegments & segments)
        : backend_(backend), graph_(graph), segments_(segments) {}

    // Runs all nodes of the call. On the CPU backend the results are bit-identical to those of a single call: the
    // backend chooses the kernel by the number of an expert's rows, and a group holds all rows of its experts.
    ggml_status begin(ExpertCall & call) override;
    void redirect(ggml_tensor *, const ExpertTensor &) override {} // begin() has run the nodes

  private:
    ProxyBackend & backend_;
    ggml_cgraph * graph_;
    GraphSegments & segments_;
};

} // namespace expertier
