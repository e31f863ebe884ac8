// One way to serve a layer: where its experts come to lie so that the nodes of its call can read them. graph/path_choice.h
// chooses the way of each call.
//
//     chosen by its layer alone   redirect, redirect, ...                      the graph is not cut for it
//     chosen at a cut             begin, redirect, redirect, ..., defer, end   defer only in a group; one call at a time
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

    // Has the experts of `call` in place for what is queued on the backend from now on; the nodes before the call's first
    // one have been queued. A way that runs the call's nodes by itself has the graph's segments skip them.
    virtual ggml_status begin(ExpertCall & call) = 0;

    // Points `node`, which multiplies by `expert` and has not been queued, at where the experts are.
    virtual void redirect(ggml_tensor * node, const ExpertTensor & expert) = 0;

    // Has what the layer holds let go of when the backend is waited for next; what cannot be handed over stays until end().
    virtual void defer() {}

    // Lets go of what the layer holds, as soon as nothing that is queued reads it. With `backend_is_idle` nothing is
    // queued. To be called after a begin() that failed or threw, too.
    virtual void end(bool backend_is_idle) { (void) backend_is_idle; }
};

} // namespace expertier
