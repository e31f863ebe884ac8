// The driver calls by which streams are captured, and what was captured is launched: as CUDA's and HIP's are.
#pragma once

namespace fake_gpu {

// Their addresses, in the order that expertier_gate of ggml_proxy/abi.h has them in, at `out`.
void put_capture_calls(void ** out);

} // namespace fake_gpu
