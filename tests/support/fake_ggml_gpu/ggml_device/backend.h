// The backend: a stream of a device, on which the CPU's kernels run.
#pragma once

#include "ggml_device/device.h"
#include "driver/stream.h"

#include <memory>

namespace fake_gpu {

ggml_backend_t new_backend(const Device & device); // null when it must fail

Stream * stream_of(ggml_backend_t backend);       // null of a backend that is none of ours
const Device & device_of(ggml_backend_t backend); // of ours

void set_n_threads(ggml_backend_t backend, int n_threads);

// What the context of an event points to.
using EventPointer = std::shared_ptr<Event>;

ggml_backend_event_t new_event(const Device & device); // null when it must fail
void free_event(ggml_backend_event_t event);
void synchronize_event(ggml_backend_event_t event);

} // namespace fake_gpu
