// Serves a layer whose experts are all in the slots of their own numbers, and stay there. The router's ids are slot ids
// then, so no ids are read or looked up, and no slots are held.
#pragma once

#include "graph/layer_path.h"
#include "graph/segments.h"

namespace expertier {

class FullyResidentPath : public LayerPath {
  public:
    explicit FullyResidentPath(GraphSegments & segments) : segments_(segments) {}

    ggml_status begin(ExpertCall &) override { return GGML_STATUS_SUCCESS; } // not called: the graph is not cut for it
    void redirect(ggml_tensor * node, const ExpertTensor & expert) override;

  private:
    GraphSegments & segments_;
    const ggml_tensor * counted_ = nullptr; // the ids tensor of the call that was counted last
};

} // namespace expertier
