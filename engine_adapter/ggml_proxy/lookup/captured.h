// A decode graph with all of its look-ups, captured once and from then on launched at once: in one graph of the driver's a look-up
// is one more kernel, where by itself it has two streams wait for each other and the graph cut in two.
//
// The look-up's stream begins the capture, and the engine's joins it by waiting for an event of that (lookup/device_lookup.h). What the engine's
// backend queues then is recorded, as are our kernels; nothing of it runs.
#pragma once

#include "lookup/device_lookup.h"
#include "ggml-backend.h"

#include <cstdint>
#include <functional>

namespace expertier {

class CapturedGraph {
  public:
    CapturedGraph() = default;
    ~CapturedGraph() { drop(); }
    CapturedGraph(const CapturedGraph &) = delete;
    CapturedGraph & operator=(const CapturedGraph &) = delete;

    // Whether this is what `key` stands for.
    bool is(uint64_t key) const { return executable_ != nullptr && key == key_; }

    // Captures what `queue` queues on `compute` and by `lookup`, which has to say that it succeeded. False when that or the
    // driver failed: then there is none. Waits for `compute` where there was another one.
    bool capture(DeviceLookup & lookup, ggml_backend_t compute, uint64_t key, const std::function<bool()> & queue);
    // Queues it behind what is queued on `compute`, which waits for it; false when the driver refused.
    bool launch(DeviceLookup & lookup, ggml_backend_t compute);
    // Nothing of it may be running.
    void drop();

  private:
    void make(const expertier_device_lookup & driver, void * graph); // null: there is none any more

    void * executable_ = nullptr;
    int32_t (*destroy_)(void * executable) = nullptr;
    uint64_t key_ = 0;
};

} // namespace expertier
