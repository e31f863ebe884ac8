// The backends of one context whose devices share every tensor (ggml's Meta backend). It hands each of them its part of a
// graph, one after another, and adds up only then. A layer's experts have to be waited for on the host: a backend that did
// so at once would keep the parts of the others from being queued. So each queues what it can, and the last one ends them
// all.
//
//     device 0   norm, router │ ids, experts, sum
//     device 1   norm, router │                  ids, experts, sum
//     host       begin, begin │ finish 0,        finish 1            both devices compute meanwhile
//
// Slots stay pinned until the backend is waited for next: at the layer after, or by whoever runs the batch, at its end.
#pragma once

#include "ggml-backend.h"

#include <memory>
#include <vector>

namespace expertier {

struct ProxyBackend;

// A graph that has been begun; what it holds is let go of when it is destroyed.
struct SuspendedGraph {
    virtual ~SuspendedGraph() = default;
    // Queues the rest of it.
    virtual ggml_status finish() = 0;
};

struct BackendGroup {
    const ProxyBackend * last = nullptr; // the one that is handed its part last
    std::vector<std::unique_ptr<SuspendedGraph>> waiting;
};

// Makes a group of proxy backends; of none of them where one is none of ours.
void make_group(ggml_backend_t * backends, size_t n_backends);

} // namespace expertier
