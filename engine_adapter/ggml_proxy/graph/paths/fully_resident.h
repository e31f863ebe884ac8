// A layer whose experts are all in the slots of their own numbers, and stay there: the router's ids are slot ids, so
// nothing is read, looked up or held.
#pragma once

#include "graph/layer_path.h"
#include "graph/segments.h"

namespace expertier {

class FullyResidentPath : public LayerPath {
  public:
    explicit FullyResidentPath(GraphSegments & segments) : segments_(segments) {}

    ggml_status begin(ExpertCall &) override { return GGML_STATUS_SUCCESS; } // chosen by its layer: never opened
    void redirect(ggml_tensor * node, const ExpertTensor & expert) override;

  private:
    GraphSegments & segments_;
    const ggml_tensor * counted_ = nullptr; // ids of the call that was counted last
};

} // namespace expertier
