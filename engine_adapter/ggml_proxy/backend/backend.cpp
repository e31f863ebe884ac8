#include "backend/backend.h"

#include "slab/compute_buffer.h"
#include "backend/expert_buffer.h"
#include "graph/graph.h"
#include "graph/prefill_stream.h"

#include <algorithm>

namespace expertier {

namespace {

ProxyBackend & self(ggml_backend_t backend) { return *static_cast<ProxyBackend *>(backend->context); }

const char * get_name(ggml_backend_t backend) { return self(backend).device->name.c_str(); }

void free_backend(ggml_backend_t backend) {
    ProxyBackend * proxy = &self(backend);
    LookupExclusion::DeviceWait wait(proxy->device->lookup_exclusion);
    {
        std::lock_guard<std::mutex> guard(proxy->device->backends_mutex);
        auto & all = proxy->device->backends;
        all.erase(std::remove(all.begin(), all.end(), proxy), all.end());
    }
    release_deferred(*proxy);
    if (const std::shared_ptr<Tiers> tiers = proxy->streamed.lock()) {
        tiers->prefill_stream()->forget(proxy->inner);
    }
    ggml_backend_synchronize(proxy->inner);
    proxy->captured.drop();
    proxy->ids.clear();
    if (proxy->pass_allocator) {
        ggml_gallocr_free(proxy->pass_allocator);
    }
    if (proxy->idle) {
        ggml_backend_event_free(proxy->idle);
    }
    ggml_backend_free(proxy->inner);
    if (proxy->device->n_backends -= 1) {
        wait.linger(); // the engine frees a context's caches after its streams, while other contexts decode
    }
    delete proxy;
    delete backend;
}

void set_tensor_async(ggml_backend_t b, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    if (may_write(tensor)) {
        self(b).inner->iface.set_tensor_async(self(b).inner, tensor, data, offset, size);
    }
}
void get_tensor_async(ggml_backend_t b, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    if (is_expert_memory(tensor)) {
        ggml_backend_tensor_get(tensor, data, offset, size);
        return;
    }
    self(b).inner->iface.get_tensor_async(self(b).inner, tensor, data, offset, size);
}
void set_tensor_2d_async(ggml_backend_t b, ggml_tensor * tensor, const void * data, size_t offset, size_t size,
                         size_t n_copies, size_t stride_tensor, size_t stride_data) {
    if (may_write(tensor)) {
        self(b).inner->iface.set_tensor_2d_async(self(b).inner, tensor, data, offset, size, n_copies, stride_tensor,
                                                 stride_data);
    }
}
void get_tensor_2d_async(ggml_backend_t b, const ggml_tensor * tensor, void * data, size_t offset, size_t size,
                         size_t n_copies, size_t stride_tensor, size_t stride_data) {
    if (is_expert_memory(tensor)) {
        ggml_backend_tensor_get_2d(tensor, data, offset, size, n_copies, stride_tensor, stride_data);
        return;
    }
    self(b).inner->iface.get_tensor_2d_async(self(b).inner, tensor, data, offset, size, n_copies, stride_tensor,
                                             stride_data);
}
// Has what is queued on `from` from now on wait for what is queued on `to`.
void wait_for(ProxyBackend & from, ProxyBackend & to) {
    if (to.idle == nullptr) {
        to.idle = ggml_backend_event_new(ggml_backend_get_device(to.inner));
    }
    if (to.idle == nullptr) { // the device has no events
        ggml_backend_synchronize(to.inner);
        return;
    }
    ggml_backend_event_record(to.idle, to.inner);
    ggml_backend_event_wait(from.inner, to.idle);
}

bool cpy_tensor_async(ggml_backend_t from, ggml_backend_t to, const ggml_tensor * source, ggml_tensor * target) {
    ggml_backend_t inner = unwrap(to);
    if (is_expert_memory(source)) {
        return false; // ggml then copies through host memory
    }
    if (from != to && inner != to && unwrap(from) != from && self(to).group && self(from).group == self(to).group) {
        // Backends copy on the source's stream and have the target's stream wait for the copy. The copy itself does not
        // wait for the target: where the engine adds shares up by copies, it would overwrite what the addition before
        // may still read.
        wait_for(self(from), self(to));
    }
    if (!may_write(target)) {
        return true; // nothing is written; the next graph fails and says why
    }
    const ggml_tensor read = in_real_buffer(source);
    ggml_tensor write = in_real_buffer(target);
    return inner->iface.cpy_tensor_async(unwrap(from), inner, &read, &write);
}
void synchronize(ggml_backend_t b) {
    self(b).inner->iface.synchronize(self(b).inner);
    self(b).deferred.take();
}
void event_record(ggml_backend_t b, ggml_backend_event_t event) {
    self(b).inner->iface.event_record(self(b).inner, event);
}
void event_wait(ggml_backend_t b, ggml_backend_event_t event) { self(b).inner->iface.event_wait(self(b).inner, event); }
void graph_optimize(ggml_backend_t b, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params) {
    self(b).inner->iface.graph_optimize(self(b).inner, graph, params);
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph * graph) { return compute_graph(self(backend), graph); }

ggml_guid guid = { 0x65, 0x78, 0x70, 0x65, 0x72, 0x74, 0x69, 0x65, 0x72, 0x2d, 0x70, 0x72, 0x6f, 0x78, 0x79, 0x31 };

} // namespace

ggml_backend_t new_proxy_backend(ProxyDevice & device, const char * params) {
    const LookupExclusion::DeviceWait wait(device.lookup_exclusion); // until `n_backends` counts this backend
    ggml_backend_t inner = ggml_backend_dev_init(device.inner, params);
    if (inner == nullptr) {
        return nullptr;
    }
    const ggml_backend_i & of = inner->iface;
    ggml_backend_i iface = {};
    iface.get_name = get_name;
    iface.free = free_backend;
    iface.graph_compute = graph_compute;
    // Optional calls exist on the proxy exactly when they exist on the inner backend: ggml asks by null checks.
    iface.set_tensor_async = of.set_tensor_async ? set_tensor_async : nullptr;
    iface.get_tensor_async = of.get_tensor_async ? get_tensor_async : nullptr;
    iface.set_tensor_2d_async = of.set_tensor_2d_async ? set_tensor_2d_async : nullptr;
    iface.get_tensor_2d_async = of.get_tensor_2d_async ? get_tensor_2d_async : nullptr;
    iface.cpy_tensor_async = of.cpy_tensor_async ? cpy_tensor_async : nullptr;
    iface.synchronize = of.synchronize ? synchronize : nullptr;
    iface.event_record = of.event_record ? event_record : nullptr;
    iface.event_wait = of.event_wait ? event_wait : nullptr;
    iface.graph_optimize = of.graph_optimize ? graph_optimize : nullptr;

    auto * proxy = new ProxyBackend;
    proxy->device = &device;
    proxy->inner = inner;
    device.n_backends += 1;
    {
        std::lock_guard<std::mutex> guard(device.backends_mutex);
        device.backends.push_back(proxy);
    }
    return new ggml_backend{ &guid, iface, &device.compute, proxy };
}

void make_group(ggml_backend_t * backends, size_t n_backends) {
    const auto group = std::make_shared<BackendGroup>();
    group->waiting.reserve(n_backends);
    for (size_t i = 0; i < n_backends; i++) {
        if (backends[i]->iface.free != free_backend) {
            return;
        }
        group->last = &self(backends[i]);
    }
    for (size_t i = 0; i < n_backends; i++) {
        self(backends[i]).group = group;
    }
}

void release_deferred(ProxyBackend & backend) {
    const std::vector<PinnedSlots> held = backend.deferred.take();
    if (!held.empty()) {
        ggml_backend_synchronize(backend.inner);
    }
}

void drain_backends(ProxyDevice & device) {
    std::lock_guard<std::mutex> guard(device.backends_mutex); // none of them goes away meanwhile
    for (ProxyBackend * backend : device.backends) {
        const std::vector<PinnedSlots> held = backend->deferred.take();
        ggml_backend_synchronize(backend->inner);
    }
}

ggml_backend_t unwrap(ggml_backend_t backend) {
    return backend && backend->iface.free == free_backend ? self(backend).inner : backend;
}

void set_n_threads(ggml_backend_t backend, int n_threads) {
    ggml_backend_t inner = unwrap(backend);
    auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_get_device(inner)), "ggml_backend_set_n_threads"));
    if (set) {
        set(inner, n_threads);
    }
}

void set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data) {
    ggml_backend_t inner = unwrap(backend);
    auto set = reinterpret_cast<ggml_backend_set_abort_callback_t>(ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_get_device(inner)), "ggml_backend_set_abort_callback"));
    if (set) {
        set(inner, callback, data);
    }
}

} // namespace expertier
