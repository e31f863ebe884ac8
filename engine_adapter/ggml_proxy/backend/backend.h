// The proxy backend: a stream of the inner device whose graphs are cut where experts are needed.
#pragma once

#include "lookup/captured.h"
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

    // Slot ids of each layer, keyed by the slot tensor of its first matrix: stable pointers between graphs.
    std::unordered_map<const ggml_tensor *, LayerIds> ids;
    PinnedInts read_room;    // for the router's ids
    uint64_t served_uid = 0; // of the last graph that was found to be served
    LookupPlan lookup_plan;
    CapturedGraph captured;
    LeadingNodes leading;                // of segments that are captured
    std::mutex deferred_mutex;           // guards `deferred`
    std::shared_ptr<BackendGroup> group; // null: it is alone
    ggml_backend_event_t idle = nullptr; // of what others of the group wait for
    std::vector<PinnedSlots> deferred;   // slots that what is queued may still read
    std::weak_ptr<Tiers> streamed;       // whose streamed layers it has computed on
};

ggml_backend_t new_proxy_backend(ProxyDevice & device, const char * params);

// The backend under a proxy backend; any other backend is returned as it is.
ggml_backend_t unwrap(ggml_backend_t backend);

// Lets go of slots that were held for what was queued, once that is done.
void release_deferred(ProxyBackend & backend);
void defer(ProxyBackend & backend, PinnedSlots && slots);

// Waits for what is queued on all backends of a device now, and lets go of the slots that were held for it.
void drain_backends(ProxyDevice & device);

void set_n_threads(ggml_backend_t backend, int n_threads);
void set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data);

} // namespace expertier
