#include "lookup/captured.h"

namespace expertier {

namespace {

constexpr int32_t relaxed = 2; // CU_STREAM_CAPTURE_MODE_RELAXED and HIP's: other threads may call the driver meanwhile

} // namespace

bool CapturedGraph::capture(DeviceLookup & lookup, ggml_backend_t compute, uint64_t key,
                            const std::function<bool()> & queue) {
    if (executable_ != nullptr) {
        ggml_backend_synchronize(compute);
    }
    const expertier_device_lookup & driver = lookup.driver();
    if (driver.capture_begin(driver.stream, relaxed) != 0) {
        drop();
        return false;
    }
    const bool is_queued = lookup.make_wait(compute) && queue();
    const bool is_joined =
        lookup.wait_for(compute); // also after a failure: the engine's stream has to leave the capture
    void * graph = nullptr;
    const bool is_ended = driver.capture_end(driver.stream, &graph) == 0;
    make(driver, is_queued && is_joined && is_ended ? graph : nullptr);
    if (graph != nullptr) {
        driver.graph_destroy(graph);
    }
    key_ = key;
    return executable_ != nullptr;
}

// Where the new graph differs from the old executable in numbers and addresses only, the executable is updated, which
// takes a fraction of the time of an instantiation.
void CapturedGraph::make(const expertier_device_lookup & driver, void * graph) {
    uint64_t failure[8] = {};
    if (executable_ != nullptr && graph != nullptr && driver.graph_exec_update != nullptr &&
        driver.graph_exec_update(executable_, graph, failure) == 0) {
        return;
    }
    drop();
    destroy_ = driver.graph_exec_destroy;
    if (graph != nullptr && driver.graph_instantiate(&executable_, graph, 0) != 0) {
        executable_ = nullptr;
    }
}

bool CapturedGraph::launch(DeviceLookup & lookup, ggml_backend_t compute) {
    const expertier_device_lookup & driver = lookup.driver();
    return lookup.wait_for(compute) && driver.graph_launch(executable_, driver.stream) == 0 &&
           lookup.make_wait(compute);
}

void CapturedGraph::drop() {
    if (executable_ != nullptr) {
        destroy_(executable_);
        executable_ = nullptr;
    }
}

} // namespace expertier
