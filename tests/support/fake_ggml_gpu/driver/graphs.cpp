#include "driver/graphs.h"

#include "driver/capture.h"
#include "driver/state.h"
#include "driver/stream.h"

#include <map>
#include <memory>
#include <mutex>

namespace fake_gpu {

namespace {

std::mutex mutex; // guards what is alive
std::map<void *, std::shared_ptr<const Graph>> graphs;
std::map<void *, std::shared_ptr<GraphExec>> execs;

template <typename Map> typename Map::mapped_type find(const Map & map, void * handle) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = map.find(handle);
    return found == map.end() ? nullptr : found->second;
}

// What runs of it still is kept by that.
template <typename Map> int32_t destroy(Map & map, void * handle) {
    typename Map::mapped_type gone; // without the lock: it may have streams to end
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = map.find(handle);
    if (found == map.end()) {
        return CAPTURE_INVALID_HANDLE;
    }
    gone = std::move(found->second);
    map.erase(found);
    counters[gone->devices[0]].live_graphs -= 1;
    return CAPTURE_OK;
}

int32_t capture_begin(void * stream, int32_t mode) {
    if (stream == nullptr || mode < 0 || mode > 2) {
        return CAPTURE_INVALID_VALUE;
    }
    if (must_fail(Call::capture)) {
        return CAPTURE_OUT_OF_MEMORY;
    }
    return static_cast<Stream *>(stream)->begin_capture();
}

int32_t capture_end(void * stream, void ** out) {
    *out = nullptr;
    std::shared_ptr<const Graph> graph;
    if (const int32_t code = static_cast<Stream *>(stream)->end_capture(graph)) {
        return code;
    }
    counters[graph->devices[0]].live_graphs += 1;
    *out = const_cast<Graph *>(graph.get());
    std::lock_guard<std::mutex> lock(mutex);
    graphs.emplace(*out, graph);
    return CAPTURE_OK;
}

int32_t graph_instantiate(void ** out, void * handle, unsigned long long flags) {
    *out = nullptr;
    const auto graph = find(graphs, handle);
    if (graph == nullptr) {
        return CAPTURE_INVALID_HANDLE;
    }
    if (flags) {
        return CAPTURE_NOT_SUPPORTED;
    }
    if (must_fail(Call::instantiate)) {
        return CAPTURE_OUT_OF_MEMORY;
    }
    auto exec = std::make_shared<GraphExec>(graph);
    *out = exec.get();
    counters[exec->devices[0]].live_graphs += 1;
    std::lock_guard<std::mutex> lock(mutex);
    execs.emplace(*out, exec);
    return CAPTURE_OK;
}

// As long as it is as many pieces; what runs of it goes on as it was.
int32_t graph_exec_update(void * handle, void * from, void *) {
    const auto exec = find(execs, handle);
    const auto graph = find(graphs, from);
    if (exec == nullptr || graph == nullptr) {
        return CAPTURE_INVALID_HANDLE;
    }
    if (exec->graph->pieces.size() != graph->pieces.size()) {
        return CAPTURE_UPDATE_FAILED;
    }
    std::shared_ptr<GraphExec> changed = std::make_shared<GraphExec>(graph);
    std::lock_guard<std::mutex> lock(mutex);
    changed->launched = exec->launched; // a graph does not run beside itself
    std::swap(execs[handle], changed);
    return CAPTURE_OK;
}

int32_t graph_launch(void * handle, void * stream) {
    const auto exec = find(execs, handle);
    return exec ? static_cast<Stream *>(stream)->launch(exec) : (int32_t) CAPTURE_INVALID_HANDLE;
}

int32_t graph_exec_destroy(void * exec) { return destroy(execs, exec); }
int32_t graph_destroy(void * graph) { return destroy(graphs, graph); }

} // namespace

void get_graph_calls(void ** out) {
    out[0] = reinterpret_cast<void *>(capture_begin);
    out[1] = reinterpret_cast<void *>(capture_end);
    out[2] = reinterpret_cast<void *>(graph_instantiate);
    out[3] = reinterpret_cast<void *>(graph_launch);
    out[4] = reinterpret_cast<void *>(graph_exec_destroy);
    out[5] = reinterpret_cast<void *>(graph_destroy);
    out[6] = reinterpret_cast<void *>(graph_exec_update);
}

} // namespace fake_gpu
