#include "ggml_device/backend.h"

#include "ggml_device/buffers.h"
#include "ggml_device/copies.h"
#include "driver/memory.h"
#include "ggml_device/snapshot.h"
#include "driver/stream.h"

#include "ggml-impl.h"

#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace fake_gpu {

namespace {

// The CPU's backend, which does one graph at a time: what a stream and a launched graph do may meet there.
struct Cpu {
    explicit Cpu(ggml_backend_t cpu) : backend(cpu) {}
    ~Cpu() { ggml_backend_free(backend); }
    const ggml_backend_t backend;
    std::mutex mutex;
};

struct Backend {
    const Device * device;
    std::shared_ptr<Cpu> cpu; // queued work and graphs keep it
    Stream stream;
    int n_threads = 1;

    // By first node: CUDA's graph of it, and the number that it had.
    struct KnownGraph {
        uint64_t uid = 0;
        std::shared_ptr<Snapshot> snapshot;
    };
    std::unordered_map<const ggml_tensor *, KnownGraph> known_graphs;
    std::unordered_map<const ggml_tensor *, ggml_tensor> first_nodes; // of graphs, as they were the last time
};

Backend & self(ggml_backend_t backend) { return *static_cast<Backend *>(backend->context); }

const EventPointer & event_of(ggml_backend_event_t event) { return *static_cast<EventPointer *>(event->context); }

const char * get_name(ggml_backend_t backend) { return self(backend).device->name.c_str(); }

void free_backend(ggml_backend_t backend) {
    const auto call = driver_call();
    if (call) {
        Stream::synchronize_all();
    }
    delete &self(backend); // its stream does what is queued
    delete backend;
}

void synchronize(ggml_backend_t backend) {
    self(backend).device->count().synchronizes += 1;
    check_captured(self(backend).device->index, self(backend).stream.synchronize(), "a backend was synchronized");
}

void set_cpu_threads(ggml_backend_t cpu, int n_threads) {
    static const auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu_device()), "ggml_backend_set_n_threads"));
    set(cpu, n_threads);
}

constexpr size_t max_known_graphs = 256; // graphs: each holds all of its tensors

std::shared_ptr<Snapshot> snapshot_of(Backend & mine, const ggml_cgraph * graph) {
    if (!switches.reused_graphs || graph->uid == 0 || graph->n_nodes == 0) {
        return std::make_shared<Snapshot>(*mine.device, graph);
    }
    if (mine.known_graphs.size() >= max_known_graphs) {
        mine.known_graphs.clear();
    }
    Backend::KnownGraph & known = mine.known_graphs[graph->nodes[0]];
    if (known.uid == graph->uid && known.snapshot->graph()->n_nodes != graph->n_nodes) {
        fault(mine.device->index, "a graph has the number of another one"); // CUDA's backend ends the process here
    }
    if (known.uid != graph->uid) {
        known.snapshot = std::make_shared<Snapshot>(*mine.device, graph);
        known.uid = graph->uid;
    }
    return known.snapshot;
}

// CUDA's backend knows a graph by its number, or by its first node and by what all of them are; it launches a graph of its own
// then, or makes one, and ends the process where its stream is captured.
void check_is_new(Backend & mine, const ggml_cgraph * graph) {
    const ggml_tensor * first = graph->nodes[0];
    ggml_tensor & last = mine.first_nodes[first];
    if (mine.stream.is_captured() && (graph->uid != 0 || memcmp(&last, first, sizeof(last)) == 0)) {
        fault(mine.device->index, "a graph that the backend may know is computed while its stream is captured");
    }
    last = *first;
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    Backend & mine = self(backend);
    if (graph->n_nodes > 0) {
        check_is_new(mine, graph);
    }
    auto snapshot = snapshot_of(mine, graph);
    if (!snapshot->problem().empty()) {
        fault(mine.device->index, snapshot->problem());
        return GGML_STATUS_FAILED;
    }
    mine.device->count().graphs += 1;
    mine.device->count().nodes += graph->n_nodes;
    mine.stream.push([cpu = mine.cpu, index = mine.device->index, snapshot, n_threads = mine.n_threads] {
        snapshot->touch_memory();
        std::lock_guard<std::mutex> lock(cpu->mutex);
        set_cpu_threads(cpu->backend, n_threads);
        if (ggml_status status = ggml_backend_graph_compute(cpu->backend, snapshot->graph())) {
            fault(index, std::string("a graph ended with status ") + ggml_status_to_string(status));
        }
    });
    return GGML_STATUS_SUCCESS;
}

// CUDA's backend ends the process here.
bool is_of(const Backend & backend, const ggml_tensor * tensor) {
    const ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    if (buffer->buft == &backend.device->buffer_type) {
        return true;
    }
    fault(backend.device->index, std::string("an asynchronous copy of ") + tensor->name + " in a buffer of type " +
                                     ggml_backend_buffer_name(buffer));
    return false;
}

void set_tensor_2d_async(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size,
                         size_t n_copies, size_t stride_tensor, size_t stride_data) {
    Backend & mine = self(backend);
    if (is_of(mine, tensor)) {
        const Rows rows{ size, n_copies, stride_tensor, stride_data };
        copy_to_device(*mine.device, mine.stream, static_cast<char *>(tensor->data) + offset, data, rows);
    }
}
void get_tensor_2d_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size,
                         size_t n_copies, size_t stride_tensor, size_t stride_data) {
    Backend & mine = self(backend);
    if (is_of(mine, tensor)) {
        const Rows rows{ size, n_copies, stride_tensor, stride_data };
        copy_to_host(*mine.device, mine.stream, data, static_cast<const char *>(tensor->data) + offset, rows);
    }
}
void set_tensor_async(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    set_tensor_2d_async(backend, tensor, data, offset, size, 1, size, size);
}
void get_tensor_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    get_tensor_2d_async(backend, tensor, data, offset, size, 1, size, size);
}

// On the source's stream; the target's waits for it.
bool cpy_tensor_async(ggml_backend_t from, ggml_backend_t to, const ggml_tensor * source, ggml_tensor * target) {
    const ggml_backend_buffer_t source_buffer = source->view_src ? source->view_src->buffer : source->buffer;
    const ggml_backend_buffer_t target_buffer = target->view_src ? target->view_src->buffer : target->buffer;
    if (from->iface.free != free_backend || to->iface.free != free_backend || !is_device_buffer(source_buffer) ||
        !is_device_buffer(target_buffer) || &device_of(source_buffer) != self(from).device ||
        &device_of(target_buffer) != self(to).device) {
        return false;
    }
    copy_within(*self(to).device, target->data, *self(from).device, self(from).stream, source->data,
                ggml_nbytes(target));
    if (from != to) {
        const auto copied = std::make_shared<Event>(self(from).device->index);
        const int device = self(from).device->index;
        check_captured(device, self(from).stream.record(copied), "a copy between backends");
        check_captured(device, self(to).stream.wait(copied), "a copy between backends");
    }
    return true;
}

void event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    self(backend).device->count().event_records += 1;
    const int32_t code = self(backend).stream.record(event_of(event));
    check_captured(self(backend).device->index, code, "an event was recorded");
}
void event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    self(backend).device->count().event_waits += 1;
    const int32_t code = self(backend).stream.wait(event_of(event));
    check_captured(self(backend).device->index, code, "a backend waits for an event");
}

ggml_guid guid = { 0x66, 0x61, 0x6b, 0x65, 0x2d, 0x67, 0x67, 0x6d, 0x6c, 0x2d, 0x67, 0x70, 0x75, 0x00, 0x00, 0x01 };

} // namespace

ggml_backend_t new_backend(const Device & device) {
    const auto call = driver_call();
    if (call) {
        Stream::synchronize_all();
    }
    ggml_backend_t cpu = must_fail(Call::stream) ? nullptr : ggml_backend_dev_init(cpu_device(), nullptr);
    if (cpu == nullptr) {
        return nullptr;
    }
    ggml_backend_i iface = {};
    iface.get_name = get_name;
    iface.free = free_backend;
    iface.set_tensor_async = set_tensor_async;
    iface.get_tensor_async = get_tensor_async;
    iface.set_tensor_2d_async = set_tensor_2d_async;
    iface.get_tensor_2d_async = get_tensor_2d_async;
    iface.cpy_tensor_async = cpy_tensor_async;
    iface.synchronize = synchronize;
    iface.graph_compute = graph_compute;
    iface.event_record = event_record;
    iface.event_wait = event_wait;
    auto * mine = new Backend{ &device, std::make_shared<Cpu>(cpu), Stream(device.index), 1, {}, {} };
    return new ggml_backend{ &guid, iface, const_cast<ggml_backend_dev_t>(&device.device), mine };
}

Stream * stream_of(ggml_backend_t backend) {
    return backend->iface.free == free_backend ? &self(backend).stream : nullptr;
}
const Device & device_of(ggml_backend_t backend) { return *self(backend).device; }

void set_n_threads(ggml_backend_t backend, int n_threads) { self(backend).n_threads = n_threads; }

ggml_backend_event_t new_event(const Device & device) {
    if (must_fail(Call::event)) {
        return nullptr;
    }
    device.count().live_events += 1;
    auto * event = new EventPointer(std::make_shared<Event>(device.index)); // queued work keeps it too
    return new ggml_backend_event{ const_cast<ggml_backend_dev_t>(&device.device), event };
}

void free_event(ggml_backend_event_t event) {
    static_cast<Device *>(event->device->context)->count().live_events -= 1;
    delete static_cast<EventPointer *>(event->context);
    delete event;
}

void synchronize_event(ggml_backend_event_t event) {
    const int index = static_cast<Device *>(event->device->context)->index;
    check_captured(index, event_of(event)->synchronize(), "an event was synchronized");
}

} // namespace fake_gpu
