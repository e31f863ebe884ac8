// A decode graph with all of its device look-ups, captured once into a graph of the driver's and launched from then on.
// In that graph a look-up is one more kernel. A look-up that is queued alone makes two streams wait for each other, and
// cuts the engine's graph in two.
//
// The look-up's stream begins the capture, and the engine's stream joins it by waiting for an event of the look-up's
// stream (lookup/device_lookup.h). During the capture the driver records what the engine's backend and our kernels
// queue, and runs nothing of it.
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

    // Whether the graph that `key` stands for is captured here.
    bool is(uint64_t key) const { return executable_ != nullptr && key == key_; }

    // Captures what `queue` queues on `compute` and through `lookup`; `queue` returns whether it succeeded. False when
    // `queue` or the driver failed: then nothing is captured. Waits for `compute` before another graph is replaced.
    bool capture(DeviceLookup & lookup, ggml_backend_t compute, uint64_t key, const std::function<bool()> & queue);
    // Queues the captured graph behind the work on `compute`, which waits for it; false when the driver refused.
    bool launch(DeviceLookup & lookup, ggml_backend_t compute);
    // Destroys the captured graph, which must not be running.
    void drop();

  private:
    void make(const expertier_device_lookup & driver, void * graph); // null: destroys the captured one

    void * executable_ = nullptr;
    int32_t (*destroy_)(void * executable) = nullptr;
    uint64_t key_ = 0;
};

} // namespace expertier
