#include "ggml_device/allreduce.h"

#include "ggml_device/backend.h"
#include "driver/memory.h"
#include "driver/races.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace fake_gpu {

namespace {

using Communicator = std::vector<ggml_backend_t>;

struct DeviceShare {
    int device;
    char * bytes;
    bool counts; // else its tensor was not computed, and counts as zeros
};

void add_up(const std::vector<DeviceShare> & shares, size_t n_bytes) {
    std::vector<float> sum(n_bytes / sizeof(float), 0.0f);
    for (const DeviceShare & share : shares) {
        touch(share.device, share.bytes, n_bytes, true, "an all-reduce");
        const auto * values = reinterpret_cast<const float *>(share.bytes);
        for (size_t i = 0; share.counts && i < sum.size(); i++) {
            sum[i] += values[i];
        }
    }
    for (const DeviceShare & share : shares) {
        std::copy(sum.begin(), sum.end(), reinterpret_cast<float *>(share.bytes));
    }
}

} // namespace

void * comm_init(ggml_backend_t * backends, size_t n_backends) {
    if (switches.no_sums) {
        return nullptr;
    }
    for (size_t i = 0; i < n_backends; i++) {
        if (stream_of(backends[i]) == nullptr) {
            return nullptr;
        }
    }
    return new Communicator(backends, backends + n_backends);
}

void comm_free(void * communicator) { delete static_cast<Communicator *>(communicator); }

// All streams wait for all, the first one adds, and the others wait for it.
bool comm_allreduce(void * communicator, ggml_tensor ** tensors) {
    const Communicator & backends = *static_cast<Communicator *>(communicator);
    const size_t n_bytes = ggml_nbytes(tensors[0]);
    if (tensors[0]->type != GGML_TYPE_F32) {
        return false;
    }
    if (ggml_nelements(tensors[0]) == 0) {
        return true;
    }
    std::vector<DeviceShare> shares;
    Stream & first = *stream_of(backends[0]);
    for (size_t i = 0; i < backends.size(); i++) {
        const Device & device = device_of(backends[i]);
        char * bytes = bytes_at(device.index, tensors[i]->data, n_bytes);
        if (bytes == nullptr) {
            fault(device.index, std::string("an all-reduce of ") + tensors[i]->name + " outside of its memory");
            return true;
        }
        shares.push_back({ device.index, bytes, (tensors[i]->flags & GGML_TENSOR_FLAG_COMPUTE) != 0 });
        const auto computed = std::make_shared<Event>(device.index);
        check_captured(device.index, stream_of(backends[i])->record(computed), "a sum");
        check_captured(device.index, first.wait(computed), "a sum");
        device.count().allreduces += 1;
    }
    first.push([shares, n_bytes] { add_up(shares, n_bytes); });
    const auto added = std::make_shared<Event>(first.device);
    check_captured(first.device, first.record(added), "a sum");
    for (size_t i = 1; i < backends.size(); i++) {
        check_captured(first.device, stream_of(backends[i])->wait(added), "a sum");
    }
    return true;
}

} // namespace fake_gpu
