// Which graphs may look experts up on the device: those that were seen often enough, of the decode shape.
#pragma once

#include "graph/input_backup.h"
#include "prefetch/router.h"

#include <cstdint>
#include <memory>
#include <vector>

struct ggml_cgraph;

namespace expertier {

class Tiers;

struct LookupPlan {
    struct Node {
        int index; // in the graph
        int layer;
        int matrix;
        int call; // index in `calls`
    };
    struct Call {  // one layer's
        int first; // its first node
        int layer;
        int64_t n_used, n_tokens;
        Router router;
    };

    uint64_t uid = 0; // of the graph that this is about; 0: of none
    int epoch = 0;    // of the tiers' slots, where it has tiers
    int n_seen = 0;   // how often it came
    int n_of_uid = 0; // the same, with whatever slots
    bool is_fit = false;
    bool rare_miss_layers_are_chosen = false; // which layers are predicted in it
    bool may_be_captured = false;             // the backend waits for nothing while it queues it
    bool cannot_be_captured = false;          // it was tried
    std::shared_ptr<Tiers> tiers;
    std::vector<Node> nodes; // that multiply by experts, in the graph's order
    std::vector<Call> calls;
    InputBackup inputs; // for a fallback
    int pause = 0;      // graphs to come that are not tried: the last fallback was just now
};

// Looks at `graph`, unless it is the one that `plan` is about.
void look_at(LookupPlan & plan, const ggml_cgraph * graph);

} // namespace expertier
