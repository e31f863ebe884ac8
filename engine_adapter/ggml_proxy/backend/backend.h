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
    std::shared_ptr<BackendGroup> group; // null: the backend is in none
    ggml_backend_event_t idle = nullptr; // recorded where other backends of the group have to wait
    std::vector<PinnedSlots> deferred;   // slots that queued work may still read
    std::weak_ptr<Tiers> streamed;       // the tiers whose streamed layers it has computed on
};

ggml_backend_t new_proxy_backend(ProxyDevice & device, const char * params);

// The backend under a proxy backend; any other backend is returned as it is.
ggml_backend_t unwrap(ggml_backend_t backend);

// Releases the deferred slots of this backend, once the queued work that reads them is done.
void release_deferred(ProxyBackend & backend);
void defer(ProxyBackend & backend, PinnedSlots && slots);

// Waits for the work that is queued on all backends of a device now, and releases their deferred slots.
void drain_backends(ProxyDevice & device);

void set_n_threads(ggml_backend_t backend, int n_threads);
void set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data);

} // namespace expertier
