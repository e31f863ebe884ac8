// Buffers of device memory and of pinned host memory.
#pragma once

#include "ggml_device/device.h"

namespace fake_gpu {

ggml_backend_buffer_type_i device_buffer_interface();
ggml_backend_buffer_type_i host_buffer_interface();

// Whether it is a buffer of device memory that was made here. As CUDA's and HIP's backends do, by the address of its
// free_buffer; whoever puts a function of his own there is not recognised.
bool is_device_buffer(ggml_backend_buffer_t buffer);

// The device whose memory such a buffer is.
const Device & device_of(ggml_backend_buffer_t buffer);

} // namespace fake_gpu
