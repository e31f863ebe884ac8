// The ways to serve a layer, and the one place where they are chosen. A new way is a class in graph/paths/, a member
// here, and the line in path_choice.cpp that says which calls it serves.
#pragma once

#include "graph/paths/fully_resident.h"
#include "graph/paths/looked_up.h"
#include "graph/paths/passes.h"
#include "graph/paths/streamed.h"

namespace expertier {

// The ways to serve the layers in one run of a graph. For each layer the three questions below are asked in their
// order, each as soon as enough is known about the call, because an early answer saves a wait.
class PathChoice {
  public:
    PathChoice(ProxyBackend & backend, ggml_cgraph * graph, GraphSegments & segments)
        : fully_resident_(segments), streamed_(backend, segments), passes_(backend, graph, segments),
          looked_up_(backend, segments) {}

    // The way that needs no cut; null where the graph is to be cut before the layer's first node.
    LayerPath * by_layer(const ExpertTensor & expert);
    // The way that needs no ids; null where the router's ids are to be read first.
    LayerPath * by_rows(const ExpertCall & call);
    // The way for the experts that the router chose.
    LayerPath & by_experts(const ExpertCall & call);

  private:
    FullyResidentPath fully_resident_;
    StreamedPath streamed_;
    PassesPath passes_;
    LookedUpPath looked_up_;
};

} // namespace expertier
