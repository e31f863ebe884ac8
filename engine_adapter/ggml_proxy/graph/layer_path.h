// One way to serve a layer: it brings the layer's experts to a place in device memory where the nodes of the layer's
// call can read them. graph/path_choice.h chooses a way for each call.
//
//     chosen by its layer alone   redirect, redirect, ...                      the graph is not cut for it
//     chosen at a cut             begin, redirect, redirect, ..., defer, end   one call at a time; defer only in a group
#pragma once

#include "graph/expert_call.h"
#include "ggml-backend.h"

namespace expertier {

class LayerPath {
  public:
    LayerPath() = default;
    virtual ~LayerPath() = default;
    LayerPath(const LayerPath &) = delete;
    LayerPath & operator=(const LayerPath &) = delete;

    // Has the experts of `call` in place for what is queued on the backend from now on. The nodes before the call's
    // first node have been queued. A way that runs the call's nodes by itself tells the graph's segments to skip them.
    virtual ggml_status begin(ExpertCall & call) = 0;

    // Has `node`, which multiplies by `expert` and has not been queued, read the experts from where they are.
    virtual void redirect(ggml_tensor * node, const ExpertTensor & expert) = 0;

    // Hands what the layer holds to the backend, which releases it when it is waited for next. What cannot be handed
    // over is held until end().
    virtual void defer() {}

    // Releases what the layer holds, as soon as no queued work reads it. With `backend_is_idle` nothing is queued. To
    // be called even after a begin() that failed or threw.
    virtual void end(bool backend_is_idle) { (void) backend_is_idle; }
};

} // namespace expertier
