// Makes engine_adapter/ggml_proxy/prefetch/distance.h callable from Python.

#include "prefetch/distance.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void * prefetch_distance_new(int layers, int may_change) {
    return new expertier::PrefetchDistance(layers, may_change != 0);
}
EXPORT void prefetch_distance_delete(void * distance) { delete static_cast<expertier::PrefetchDistance *>(distance); }
EXPORT void prefetch_distance_note(void * distance, int is_used, int in_time) {
    static_cast<expertier::PrefetchDistance *>(distance)->note(is_used != 0, in_time != 0);
}
EXPORT int prefetch_distance_update(void * distance) {
    static_cast<expertier::PrefetchDistance *>(distance)->update();
    return static_cast<expertier::PrefetchDistance *>(distance)->layers();
}
