// Copies that are queued: their addresses are looked at when they are queued, their bytes when they are done.
#pragma once

#include "ggml_device/device.h"
#include "driver/stream.h"

namespace fake_gpu {

struct Rows {
    size_t bytes, n, device_stride, host_stride;
    size_t device_span() const { return n ? (n - 1) * device_stride + bytes : 0; }
    size_t host_span() const { return n ? (n - 1) * host_stride + bytes : 0; }
};

void copy_to_device(const Device & device, Stream & stream, void * target, const void * source, const Rows & rows);
void copy_to_host(const Device & device, Stream & stream, void * target, const void * source, const Rows & rows);
void copy_within(const Device & target_device, void * target, const Device & source_device, Stream & stream,
                 const void * source, size_t bytes);

} // namespace fake_gpu
