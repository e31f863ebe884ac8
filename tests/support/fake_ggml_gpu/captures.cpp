#include "captures.h"

#include "state.h"
#include "stream.h"

#include <cstdint>
#include <memory>

namespace fake_gpu {

namespace {

constexpr int32_t refused = 1, update_failed = 910;

using Graph = std::shared_ptr<Capture>;

struct Executable {
    int   device;
    Graph graph;
};

int32_t capture_begin(void * stream, int32_t) {
    return must_fail(Call::capture) || !static_cast<Stream *>(stream)->begin_capture() ? refused : 0;
}

int32_t capture_end(void * stream, void ** out) {
    Graph graph = static_cast<Stream *>(stream)->end_capture();
    *out        = graph ? new Graph(std::move(graph)) : nullptr;
    return *out ? 0 : refused;
}

int32_t instantiate(void ** out, void * graph, uint64_t) {
    if (must_fail(Call::instantiate)) {
        return refused;
    }
    const Graph & from = *static_cast<Graph *>(graph);
    counters[from->device].live_graphs += 1;
    *out = new Executable{ from->device, from };
    return 0;
}

// As long as it is as many kernels; whatever is queued already goes on as it was.
int32_t update(void * executable, void * graph, void *) {
    Executable &  mine = *static_cast<Executable *>(executable);
    const Graph & from = *static_cast<Graph *>(graph);
    if (mine.graph->work.size() != from->work.size()) {
        return update_failed;
    }
    mine.graph = from;
    return 0;
}

int32_t launch(void * executable, void * stream) {
    const Executable & mine = *static_cast<Executable *>(executable);
    counters[mine.device].graph_launches += 1;
    static_cast<Stream *>(stream)->launch(mine.graph->work);
    return 0;
}

int32_t destroy_executable(void * executable) {
    counters[static_cast<Executable *>(executable)->device].live_graphs -= 1;
    delete static_cast<Executable *>(executable);
    return 0;
}

int32_t destroy_graph(void * graph) {
    delete static_cast<Graph *>(graph);
    return 0;
}

} // namespace

void put_capture_calls(void ** out) {
    out[0] = reinterpret_cast<void *>(capture_begin);
    out[1] = reinterpret_cast<void *>(capture_end);
    out[2] = reinterpret_cast<void *>(instantiate);
    out[3] = reinterpret_cast<void *>(launch);
    out[4] = reinterpret_cast<void *>(destroy_executable);
    out[5] = reinterpret_cast<void *>(destroy_graph);
    out[6] = reinterpret_cast<void *>(update);
}

} // namespace fake_gpu
