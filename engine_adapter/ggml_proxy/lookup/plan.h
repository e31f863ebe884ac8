// What is known of the graph that a backend computes: whether its experts can be looked up on the device, and how.
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

    uint64_t uid = 0; // of the graph that this plan is about; 0: there is none
    int epoch = 0;    // of the tiers' slots when the plan was made (Tiers::epoch)
    int n_seen = 0;   // how often the graph came with the slots where they are now
    int n_of_uid = 0; // how often the graph came
    bool is_fit = false;
    bool rare_miss_layers_are_chosen = false; // whether it is chosen which layers are predicted in it
    bool may_be_captured = false;    // the engine's backend does not wait for the device while it queues the graph
    bool cannot_be_captured = false; // a capture has failed
    std::shared_ptr<Tiers> tiers;
    std::vector<Node> nodes; // which multiply by experts, in the graph's order
    std::vector<Call> calls;
    InputBackup inputs; // to run the graph again after a fallback
    int pause = 0;      // so many graphs to come run without device look-ups, after a fallback
};

// Makes `plan` one for `graph`, or counts that the graph came again.
void look_at(LookupPlan & plan, const ggml_cgraph * graph);

} // namespace expertier
