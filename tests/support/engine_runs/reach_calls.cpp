// Makes engine_adapter/ggml_proxy/prefetch/reach.h callable from Python.

#include "prefetch/reach.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void * reach_new(int layers, int may_change) { return new expertier::Reach(layers, may_change != 0); }
EXPORT void reach_delete(void * reach) { delete static_cast<expertier::Reach *>(reach); }
EXPORT void reach_note(void * reach, int is_used, int in_time) {
    static_cast<expertier::Reach *>(reach)->note(is_used != 0, in_time != 0);
}
EXPORT int reach_settle(void * reach) {
    static_cast<expertier::Reach *>(reach)->settle();
    return static_cast<expertier::Reach *>(reach)->layers();
}
