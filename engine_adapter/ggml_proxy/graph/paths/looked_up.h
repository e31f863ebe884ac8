// Serves a layer whose chosen experts fit in its slots. The experts are looked up on the host, missing experts are
// filled, and the slots stay pinned until no queued work reads them. Nodes take slot ids in place of the router's ids.
#pragma once

#include "graph/layer_path.h"
#include "graph/segments.h"

namespace expertier {

class LookedUpPath : public LayerPath {
  public:
    LookedUpPath(ProxyBackend & backend, GraphSegments & segments) : backend_(backend), segments_(segments) {}

    ggml_status begin(ExpertCall & call) override;
    void redirect(ggml_tensor * node, const ExpertTensor & expert) override;
    void defer() override;
    void end(bool backend_is_idle) override;

  private:
    ggml_status upload_slot_ids(const ExpertCall & call);

    ProxyBackend & backend_;
    GraphSegments & segments_;
    PinnedSlots pinned_; // the slots of the open call; their fills may still be queued
    ggml_tensor * slot_ids_ = nullptr;
};

} // namespace expertier
