// The backends of one context whose devices share every tensor. ggml's Meta backend hands each backend its share of a
// graph, one after another, and adds the results up. The host has to wait for a layer's expert ids. If a backend waited
// at once, the other devices' shares could not be queued meanwhile. So each backend queues what it can without waiting,
// and the last one finishes the graphs of all.
//
//     device 0   norm, router │ ids, experts, sum
//     device 1   norm, router │                  ids, experts, sum
//     host       begin, begin │ finish 0,        finish 1            both devices compute meanwhile
//
// Slots stay pinned until the host waits for the backend next: at the layer after, or at the end of the batch.
#pragma once

#include "ggml-backend.h"

#include <memory>
#include <vector>

namespace expertier {

struct ProxyBackend;

// A graph whose first part is queued. Its destructor releases the slots that the graph holds.
struct SuspendedGraph {
    virtual ~SuspendedGraph() = default;
    // Queues the rest of the graph.
    virtual ggml_status finish() = 0;
};

struct BackendGroup {
    const ProxyBackend * last = nullptr; // the backend that gets its share of a graph last
    std::vector<std::unique_ptr<SuspendedGraph>> waiting;
};

// Makes a group of these backends if all of them are proxy backends; otherwise does nothing.
void make_group(ggml_backend_t * backends, size_t n_backends);

} // namespace expertier
