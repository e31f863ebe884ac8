#include "backend/device.h"

#include "backend/backend.h"
#include "slab/compute_region.h"
#include "backend/expert_buffer.h"
#include "backend/split_buffer.h"
#include "backend/wrapper_type.h"

#include <algorithm>
#include <cstring>
#include <memory>

namespace expertier {

namespace {

std::vector<std::unique_ptr<ProxyDevice>> owned; // ggml keeps raw pointers to devices until the process ends
std::vector<ProxyDevice *> list;

ProxyDevice & self(ggml_backend_dev_t device) { return *static_cast<ProxyDevice *>(device->context); }

const char * get_name(ggml_backend_dev_t device) { return self(device).name.c_str(); }
const char * get_description(ggml_backend_dev_t device) { return self(device).description.c_str(); }

void get_memory(ggml_backend_dev_t device, size_t * free, size_t * total) {
    ggml_backend_dev_memory(self(device).inner, free, total);
}

enum ggml_backend_dev_type get_type(ggml_backend_dev_t device) {
    return self(device).is_hidden ? GGML_BACKEND_DEVICE_TYPE_IGPU : GGML_BACKEND_DEVICE_TYPE_GPU;
}

enum ggml_backend_dev_type hidden_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_IGPU; }

std::atomic<bool> hides_memory{ false }; // hidden devices say that their memory is the CPU's (show_only)

ggml_backend_buffer_type_t hidden_buffer_type(ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); }

void get_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    ggml_backend_dev_get_props(self(device).inner, props);
    props->name = get_name(device);
    props->description = get_description(device);
    props->type = GGML_BACKEND_DEVICE_TYPE_GPU;
    props->device_id = nullptr; // with the inner device's id, the engine would drop the proxy as a duplicate
}

void show_memory() {
    hides_memory = false;
    for (ProxyDevice * proxy : list) {
        if (proxy->inner_buffer_type != nullptr) {
            proxy->inner->iface.get_buffer_type = proxy->inner_buffer_type;
            proxy->inner_buffer_type = nullptr;
        }
    }
}

ggml_backend_t init_backend(ggml_backend_dev_t device, const char * params) {
    if (hides_memory) {
        show_memory(); // the engine has chosen devices, and what computes on them needs their real buffer types
    }
    return new_proxy_backend(self(device), params);
}

ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t device) {
    if (ExpertsAsDefault::is_on()) {
        return &self(device).experts;
    }
    if (self(device).is_hidden && hides_memory) {
        return ggml_backend_cpu_buffer_type();
    }
    if (self(device).has_regions()) {
        return &self(device).wrapper;
    }
    return own_buffer_type(self(device).inner);
}

ggml_backend_buffer_type_t get_host_buffer_type(ggml_backend_dev_t device) {
    return ggml_backend_dev_host_buffer_type(self(device).inner);
}

ggml_backend_buffer_t buffer_from_host_ptr(ggml_backend_dev_t device, void * pointer, size_t size, size_t max_tensor) {
    return ggml_backend_dev_buffer_from_host_ptr(self(device).inner, pointer, size, max_tensor);
}

bool supports_op(ggml_backend_dev_t device, const ggml_tensor * op) {
    return find_unserved_source(op) == nullptr && ggml_backend_dev_supports_op(self(device).inner, op);
}

bool supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
    return type == &self(device).experts || type == &self(device).wrapper ||
           ggml_backend_dev_supports_buft(self(device).inner, type);
}

bool offload_op(ggml_backend_dev_t device, const ggml_tensor * op) {
    return ggml_backend_dev_offload_op(self(device).inner, op);
}

// Events belong to the inner device: ggml synchronises and frees them through the device that made them.
ggml_backend_event_t event_new(ggml_backend_dev_t device) { return ggml_backend_event_new(self(device).inner); }
void event_free(ggml_backend_dev_t, ggml_backend_event_t event) { ggml_backend_event_free(event); }
void event_synchronize(ggml_backend_dev_t, ggml_backend_event_t event) { ggml_backend_event_synchronize(event); }

// The naming device never runs anything; it is of type CPU so that the engine does not place layers on it.
const char * naming_name(ggml_backend_dev_t device) { return self(device).buffer_name.c_str(); }
void naming_memory(ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = 0; }
enum ggml_backend_dev_type naming_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_CPU; }
void naming_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    *props = {};
    props->name = naming_name(device);
    props->description = get_description(device);
    props->type = GGML_BACKEND_DEVICE_TYPE_CPU;
}
ggml_backend_t naming_init(ggml_backend_dev_t, const char *) { return nullptr; }
ggml_backend_buffer_type_t naming_buffer_type(ggml_backend_dev_t device) {
    if (hides_memory) {
        return ggml_backend_cpu_buffer_type();
    }
    const ggml_backend_buffer_type_t named = self(device).named;
    return named ? named : &self(device).experts;
}
bool naming_supports_op(ggml_backend_dev_t, const ggml_tensor *) { return false; }
bool naming_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t) { return false; }

ggml_backend_device_i compute_interface(ggml_backend_dev_t inner) {
    ggml_backend_device_i iface = {};
    iface.get_name = get_name;
    iface.get_description = get_description;
    iface.get_memory = get_memory;
    iface.get_type = get_type;
    iface.get_props = get_props;
    iface.init_backend = init_backend;
    iface.get_buffer_type = get_buffer_type;
    iface.supports_op = supports_op;
    iface.supports_buft = supports_buft;
    // Optional calls exist on the proxy exactly when they exist on the inner device: ggml asks by null checks.
    const ggml_backend_device_i & of = inner->iface;
    iface.get_host_buffer_type = of.get_host_buffer_type ? get_host_buffer_type : nullptr;
    iface.buffer_from_host_ptr = of.buffer_from_host_ptr ? buffer_from_host_ptr : nullptr;
    iface.offload_op = of.offload_op ? offload_op : nullptr;
    iface.event_new = of.event_new ? event_new : nullptr;
    iface.event_free = of.event_free ? event_free : nullptr;
    iface.event_synchronize = of.event_synchronize ? event_synchronize : nullptr;
    return iface;
}

ggml_backend_device_i naming_interface() {
    ggml_backend_device_i iface = {};
    iface.get_name = naming_name;
    iface.get_description = get_description;
    iface.get_memory = naming_memory;
    iface.get_type = naming_type;
    iface.get_props = naming_props;
    iface.init_backend = naming_init;
    iface.get_buffer_type = naming_buffer_type;
    iface.supports_op = naming_supports_op;
    iface.supports_buft = naming_supports_buft;
    return iface;
}

} // namespace

std::vector<std::shared_ptr<ComputeRegion>> ProxyDevice::compute_regions() {
    std::lock_guard<std::mutex> guard(regions_mutex);
    return { regions.begin(), regions.begin() + n_regions };
}

void ProxyDevice::add_region(std::shared_ptr<ComputeRegion> region) {
    std::lock_guard<std::mutex> guard(regions_mutex);
    if (region->most_bytes() > 0) {
        regions.insert(regions.begin() + n_regions, std::move(region));
        n_regions += 1;
    } else {
        regions.push_back(std::move(region));
    }
    n_bound += 1;
}

void ProxyDevice::follow_demand() {
    if (n_bound == 0) {
        return;
    }
    std::vector<std::shared_ptr<ComputeRegion>> all;
    {
        std::lock_guard<std::mutex> guard(regions_mutex);
        all = regions;
    }
    for (const std::shared_ptr<ComputeRegion> & region : all) {
        region->follow_demand();
    }
}

void ProxyDevice::remove_region(const std::shared_ptr<ComputeRegion> & region) {
    std::lock_guard<std::mutex> guard(regions_mutex);
    const auto at = std::find(regions.begin(), regions.end(), region);
    if (at != regions.end()) {
        n_regions -= at - regions.begin() < n_regions;
        n_bound -= 1;
        regions.erase(at);
    }
}

ProxyDevice * find_proxy(ggml_backend_dev_t device) {
    for (ProxyDevice * proxy : list) {
        if (device == &proxy->compute) {
            return proxy;
        }
    }
    return nullptr;
}

void make_proxies(ggml_backend_reg_t registry) {
    const size_t n_devices = ggml_backend_dev_count(); // the proxies themselves are registered after this returns
    for (size_t i = 0; i < n_devices; i++) {
        ggml_backend_dev_t inner = ggml_backend_dev_get(i);
        if (ggml_backend_dev_type(inner) == GGML_BACKEND_DEVICE_TYPE_ACCEL) {
            continue; // an accelerator helps another device with a few operations, and has no memory for slots
        }
        auto proxy = std::make_unique<ProxyDevice>();
        proxy->inner = inner;
        proxy->name = std::string("TIER_") + ggml_backend_dev_name(inner);
        proxy->buffer_name = std::string("EXPERTS_") + ggml_backend_dev_name(inner);
        proxy->description = std::string("expertier over ") + ggml_backend_dev_description(inner);
        proxy->compute = { compute_interface(inner), registry, proxy.get() };
        proxy->naming = { naming_interface(), registry, proxy.get() };
        init_expert_buffer_type(&proxy->experts, &proxy->naming, proxy->buffer_name.c_str());
        init_wrapper_type(&proxy->wrapper, *proxy);
        list.push_back(proxy.get());
        owned.push_back(std::move(proxy));
    }
}

const std::vector<ProxyDevice *> & proxies() { return list; }

void show_only(const std::vector<const ProxyDevice *> & shown, bool splits_tensors) {
    for (ProxyDevice * proxy : list) {
        ggml_backend_device_i & real = proxy->inner->iface;
        proxy->is_hidden = std::find(shown.begin(), shown.end(), proxy) == shown.end();
        if (proxy->inner_type == nullptr && ggml_backend_dev_type(proxy->inner) == GGML_BACKEND_DEVICE_TYPE_GPU) {
            proxy->inner_type = real.get_type;
            real.get_type = hidden_type;
        }
        if (splits_tensors && proxy->inner_buffer_type == nullptr) {
            proxy->inner_buffer_type = real.get_buffer_type;
            real.get_buffer_type = hidden_buffer_type;
        }
    }
    hides_memory = splits_tensors;
}

void show_all() {
    show_memory();
    for (ProxyDevice * proxy : list) {
        proxy->is_hidden = false;
        if (proxy->inner_type != nullptr) {
            proxy->inner->iface.get_type = proxy->inner_type;
            proxy->inner_type = nullptr;
        }
    }
}

ggml_backend_buffer_type_t own_buffer_type(ggml_backend_dev_t device) {
    for (const ProxyDevice * proxy : list) {
        const auto hidden = proxy->inner_buffer_type;
        if (proxy->inner == device && hidden != nullptr) {
            return hidden(device);
        }
    }
    return ggml_backend_dev_buffer_type(device);
}

} // namespace expertier
