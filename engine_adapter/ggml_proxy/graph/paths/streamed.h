// Serves a layer for a large batch: the layer's experts are uploaded to a streamed layer (graph/prefill_stream.h) while
// the layer before it computes, and no slot is taken. Nodes keep the router's ids.
#pragma once

#include "graph/layer_path.h"
#include "graph/prefill_stream.h"
#include "graph/segments.h"

#include <optional>

namespace expertier {

class StreamedPath : public LayerPath {
  public:
    StreamedPath(ProxyBackend & backend, GraphSegments & segments) : backend_(backend), segments_(segments) {}

    // Whether `call` is large enough to stream its layer, and the layer has fewer slots than experts. A layer with a
    // slot for every expert evicts nothing, so its experts had better be in the slots.
    static bool is_large_batch(const ExpertCall & call);

    // Brings the experts that the router chose, or all experts of the layer where the router's ids have not been read.
    ggml_status begin(ExpertCall & call) override;
    void redirect(ggml_tensor * node, const ExpertTensor & expert) override;

  private:
    ProxyBackend & backend_;
    GraphSegments & segments_;
    std::optional<PrefillStream::Use> use_; // held from the first streamed layer until the graph's end
};

} // namespace expertier
