// The proxy backend: a stream of the inner device. Graphs that run on it are cut where a layer needs its experts.
#pragma once

#include "lookup/captured.h"
#include "backend/deferred.h"
#include "backend/device.h"
#include "lookup/plan.h"
#include "backend/group.h"
#include "residency/layer_ids.h"
#include "graph/leading_nodes.h"
#include "residency/tiers.h"

#include <mutex>
#include <memory>
#include <unordered_map>
#include <vector>

namespace expertier {

struct ProxyBackend {
    ProxyDevice * device;
    ggml_backend_t inner;
    ggml_gallocr_t pass_allocator = nullptr; // temporaries of passes, made when first needed

    // Slot ids of each layer, by the slot tensor of its first matrix, whose address stays the same between graphs.
    std::unordered_map<const ggml_tensor *, LayerIds> ids;
    PinnedInts read_room;    // the router's ids are read into it
    uint64_t served_uid = 0; // the engine's number of the last graph that the tiers were found to serve
    LookupPlan lookup_plan;
    CapturedGraph captured;
    LeadingNodes leading;                // the first nodes of segments that are captured
    std::shared_ptr<BackendGroup> group; // null: the backend is in no group
    ggml_backend_event_t idle = nullptr; // recorded when another backend of the group has to wait for this one
    Deferred<PinnedSlots> deferred;      // slots that queued work may still read
    std::weak_ptr<Tiers> streamed;       // the tiers whose streamed layers this backend has computed on
};

ggml_backend_t new_proxy_backend(ProxyDevice & device, const char * params);

// The backend under a proxy backend; any other backend is returned as it is.
ggml_backend_t unwrap(ggml_backend_t backend);

// Waits for this backend's queued work and releases its deferred slots; does nothing where no slots are deferred.
void release_deferred(ProxyBackend & backend);

// Waits for the work that all backends of a device have queued by now, and releases their deferred slots.
void drain_backends(ProxyDevice & device);

void set_n_threads(ggml_backend_t backend, int n_threads);
void set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data);

} // namespace expertier
