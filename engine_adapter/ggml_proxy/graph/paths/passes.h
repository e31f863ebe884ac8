// A layer call with more distinct experts than slots: run by groups of experts, each group's rows gathered.
#pragma once

#include "graph/layer_path.h"
#include "graph/segments.h"

namespace expertier {

class PassesPath : public LayerPath {
  public:
    PassesPath(ProxyBackend & backend, ggml_cgraph * graph, GraphSegments & segments)
        : backend_(backend), graph_(graph), segments_(segments) {}

    // Runs the call's nodes to the last. Bit-identical on the CPU backend: a row meets the same kernel as in one call, since
    // the kernel is chosen by the rows of an expert, and a group holds all of its experts' rows.
    ggml_status begin(ExpertCall & call) override;
    void redirect(ggml_tensor *, const ExpertTensor &) override {} // begin() has run the nodes

  private:
    ProxyBackend & backend_;
    ggml_cgraph * graph_;
    GraphSegments & segments_;
};

} // namespace expertier
