#include "ggml_device/copies.h"

#include "driver/memory.h"
#include "driver/races.h"

#include <cstring>
#include <string>
#include <vector>

namespace fake_gpu {

namespace {

// The device's side of a copy by rows.
void touch_rows(int device, const char * bytes, const Rows & rows, bool writes) {
    for (size_t i = 0; i < rows.n; i++) {
        touch(device, bytes + i * rows.device_stride, rows.bytes, writes, writes ? "a queued set" : "a queued get");
    }
}

void copy_rows(char * target, size_t target_stride, const char * source, size_t source_stride, const Rows & rows) {
    for (size_t i = 0; i < rows.n; i++) {
        memcpy(target + i * target_stride, source + i * source_stride, rows.bytes);
    }
}

// The host's side of a copy.
struct HostSide {
    const char * begin;
    size_t span;
    bool pinned;
    const char * what; // "a copy from it", "a copy to it"
};

// Queues a copy whose host memory, if it is pinned now, has to stay pinned until the copy is done.
template <typename Copy> void push_copy(Stream & stream, int device, const HostSide & host, Copy copy) {
    stream.push([=] {
        const auto held = hold_pinned();
        if (host.pinned && !is_still_pinned(host.begin, host.span)) {
            fault(device, std::string("pinned memory was freed while ") + host.what + " was queued");
            return;
        }
        copy();
    });
}

} // namespace

void copy_to_device(const Device & device, Stream & stream, void * target, const void * source, const Rows & rows) {
    const size_t span = rows.host_span();
    char * bytes = bytes_at(device.index, target, rows.device_span());
    if (bytes == nullptr) {
        fault(device.index, "a copy to the device ends outside of its memory");
        return;
    }
    const bool pinned = is_pinned(source, span);
    Counters & count = device.count();
    count.async_sets += 1;
    count.bytes_to_device += (int64_t) (rows.bytes * rows.n);
    count.pageable_bytes_to_device += pinned ? 0 : (int64_t) (rows.bytes * rows.n);

    const char * from = static_cast<const char *>(source);
    if (!pinned && switches.pageable_at_call && !stream.is_captured()) { // a graph reads when it runs
        auto copied = std::make_shared<std::vector<char>>(from, from + span);
        stream.push([=, index = device.index] {
            touch_rows(index, bytes, rows, true);
            copy_rows(bytes, rows.device_stride, copied->data(), rows.host_stride, rows);
        });
        return;
    }
    push_copy(stream, device.index, { from, span, pinned, "a copy from it" }, [=, index = device.index] {
        touch_rows(index, bytes, rows, true);
        copy_rows(bytes, rows.device_stride, from, rows.host_stride, rows);
    });
}

void copy_to_host(const Device & device, Stream & stream, void * target, const void * source, const Rows & rows) {
    const size_t span = rows.host_span();
    const char * bytes = bytes_at(device.index, source, rows.device_span());
    if (bytes == nullptr) {
        fault(device.index, "a copy from the device begins outside of its memory");
        return;
    }
    device.count().async_gets += 1;
    device.count().bytes_to_host += (int64_t) (rows.bytes * rows.n);

    const bool pinned = is_pinned(target, span);
    char * to = static_cast<char *>(target);
    push_copy(stream, device.index, { to, span, pinned, "a copy to it" }, [=, index = device.index] {
        touch_rows(index, bytes, rows, false);
        copy_rows(to, rows.host_stride, bytes, rows.device_stride, rows);
    });
    if (!pinned && switches.pageable_at_call && !stream.is_captured()) {
        stream.synchronize();
    }
}

void copy_within(const Device & target_device, void * target, const Device & source_device, Stream & stream,
                 const void * source, size_t bytes) {
    char * to = bytes_at(target_device.index, target, bytes);
    const char * from = bytes_at(source_device.index, source, bytes);
    if (to == nullptr || from == nullptr) {
        fault(source_device.index, "a copy between buffers leaves the devices' memory");
        return;
    }
    source_device.count().async_copies += 1;
    source_device.count().bytes_within += (int64_t) bytes;
    stream.push([=, target_index = target_device.index, source_index = source_device.index] {
        touch(source_index, from, bytes, false, "a queued copy");
        touch(target_index, to, bytes, true, "a queued copy");
        memmove(to, from, bytes);
    });
}

} // namespace fake_gpu
