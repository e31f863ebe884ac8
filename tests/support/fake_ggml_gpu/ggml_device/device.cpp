#include "ggml_device/device.h"

#include "ggml_device/allreduce.h"
#include "ggml_device/backend.h"
#include "ggml_device/buffers.h"
#include "driver/memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace fake_gpu {

namespace {

constexpr const char * count_variable = "FAKE_GGML_GPUS"; // for hosts that only load the library

constexpr int64_t offload_rows = 32; // from so many on CUDA runs an operation whose weights are in host memory

Device devices[max_devices];
int count = 0; // of those; 0: not chosen yet

Device & self(ggml_backend_dev_t device) { return *static_cast<Device *>(device->context); }

const char * get_name(ggml_backend_dev_t device) { return self(device).name.c_str(); }
const char * get_description(ggml_backend_dev_t) { return "a fake GPU of the tests"; }

void get_memory(ggml_backend_dev_t device, size_t * free, size_t * total) {
    *total = limit_of(self(device).index);
    *free = *total - std::min(*total, used_of(self(device).index));
}

enum ggml_backend_dev_type get_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void get_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    *props = {};
    props->name = get_name(device);
    props->description = get_description(device);
    props->type = get_type(device);
    props->device_id = get_name(device);
    get_memory(device, &props->memory_free, &props->memory_total);
    props->caps.async = true;
    props->caps.host_buffer = true;
    props->caps.buffer_from_host_ptr = false;
    props->caps.events = true;
    props->caps.mmap_support = true;
}

ggml_backend_t init_backend(ggml_backend_dev_t device, const char *) { return new_backend(self(device)); }

ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t device) { return &self(device).buffer_type; }
ggml_backend_buffer_type_t get_host_buffer_type(ggml_backend_dev_t) { return host_buffer_type(); }

bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    switch (op->op) {
    case GGML_OP_MAP_CUSTOM1: // functions of the host
    case GGML_OP_MAP_CUSTOM2:
    case GGML_OP_MAP_CUSTOM3:
    case GGML_OP_CUSTOM:
        return false;
    default:
        return ggml_backend_dev_supports_op(cpu_device(), op);
    }
}

bool supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
    return type == &self(device).buffer_type;
}

bool offload_op(ggml_backend_dev_t, const ggml_tensor * op) {
    switch (op->op) {
    case GGML_OP_GET_ROWS:
        return false;
    case GGML_OP_MUL_MAT:
        return op->ne[1] >= offload_rows;
    case GGML_OP_MUL_MAT_ID:
    case GGML_OP_ROPE:
        return op->ne[2] >= offload_rows;
    default:
        return ggml_nrows(op) >= offload_rows;
    }
}

ggml_backend_event_t event_new(ggml_backend_dev_t device) { return new_event(self(device)); }
void event_free(ggml_backend_dev_t, ggml_backend_event_t event) { free_event(event); }
void event_synchronize(ggml_backend_dev_t, ggml_backend_event_t event) { synchronize_event(event); }

ggml_backend_device_i device_interface() {
    ggml_backend_device_i iface = {};
    iface.get_name = get_name;
    iface.get_description = get_description;
    iface.get_memory = get_memory;
    iface.get_type = get_type;
    iface.get_props = get_props;
    iface.init_backend = init_backend;
    iface.get_buffer_type = get_buffer_type;
    iface.get_host_buffer_type = get_host_buffer_type;
    iface.supports_op = supports_op;
    iface.supports_buft = supports_buft;
    iface.offload_op = offload_op;
    iface.event_new = event_new;
    iface.event_free = event_free;
    iface.event_synchronize = event_synchronize;
    return iface;
}

const char * registry_name(ggml_backend_reg_t) { return "FAKE"; }
size_t device_count(ggml_backend_reg_t) { return (size_t) count; }
ggml_backend_dev_t get_device(ggml_backend_reg_t, size_t index) { return &device_at((int) index).device; }
void * get_proc_address(ggml_backend_reg_t, const char * name) {
    const std::pair<const char *, void *> known[] = {
        { "ggml_backend_set_n_threads", reinterpret_cast<void *>(set_n_threads) },
        { "ggml_backend_comm_init", reinterpret_cast<void *>(comm_init) },
        { "ggml_backend_comm_free", reinterpret_cast<void *>(comm_free) },
        { "ggml_backend_comm_allreduce_tensor", reinterpret_cast<void *>(comm_allreduce) },
    };
    for (const auto & [known_name, function] : known) {
        if (strcmp(name, known_name) == 0) {
            return function;
        }
    }
    return nullptr;
}

ggml_backend_reg registry = { GGML_BACKEND_API_VERSION,
                              { registry_name, device_count, get_device, get_proc_address },
                              nullptr };

} // namespace

Device & device_at(int index) { return devices[index]; }

void configure(int n, size_t bytes_each) {
    count = std::min(n, max_devices);
    for (int i = 0; i < count; i++) {
        set_limit(i, bytes_each);
    }
}

ggml_backend_dev_t cpu_device() {
    static ggml_backend_dev_t device = ggml_backend_dev_by_name("CPU");
    return device;
}

ggml_backend_buffer_type_t host_buffer_type() {
    static ggml_backend_buffer_type type = { host_buffer_interface(), &devices[0].device, nullptr };
    return &type;
}

} // namespace fake_gpu

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    using namespace fake_gpu;
    if (count == 0) {
        const char * wanted = getenv(count_variable);
        configure(wanted ? std::max(1, atoi(wanted)) : 1, (size_t) 1 << 30);
    }
    for (int i = 0; i < count; i++) {
        Device & device = devices[i];
        device.index = i;
        device.name = "FAKE" + std::to_string(i);
        device.device = { device_interface(), &registry, &device };
        device.buffer_type = { device_buffer_interface(), &device.device, &device };
    }
    return &registry;
}
