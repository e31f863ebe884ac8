// The fake devices, and the entry that ggml finds by dlsym.
#pragma once

#include "ggml-backend-impl.h"
#include "driver/state.h"

#include <string>

namespace fake_gpu {

struct Device {
    int index = 0;
    std::string name; // FAKE0, FAKE1, ...
    ggml_backend_device device;
    ggml_backend_buffer_type buffer_type; // of its own memory, not the host's
    Counters & count() const { return counters[index]; }
};

Device & device_at(int index);

// Has effect until ggml has asked for the devices.
void configure(int n_devices, size_t bytes_each);

ggml_backend_dev_t cpu_device();               // which computes
ggml_backend_buffer_type_t host_buffer_type(); // pinned memory, one type for all devices

} // namespace fake_gpu
