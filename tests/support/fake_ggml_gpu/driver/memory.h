// Memory of the devices and pinned memory of the host.
//
// Device memory has two mappings: its address, which nobody can touch, so that a host that reads or writes through it
// ends as on hardware, and the bytes, which only this library knows of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <shared_mutex>

namespace fake_gpu {

void set_limit(int device, size_t bytes); // of device memory; what is allocated already stays
size_t limit_of(int device);
size_t used_of(int device);

// Null when the device has not that much free, or must fail.
void * allocate(int device, size_t bytes);
void release(void * address);

// Where the bytes of [address, address + bytes) are; null unless all of it lies in one allocation of `device`.
char * bytes_at(int device, const void * address, size_t bytes);

void * pin(size_t bytes);
void unpin(void * address);
bool is_pinned(const void * address, size_t bytes);

// Held while bytes are copied from or to pinned memory: it does not go away meanwhile.
std::shared_lock<std::shared_mutex> hold_pinned();
// The same as is_pinned, for whoever holds that.
bool is_still_pinned(const void * address, size_t bytes);

} // namespace fake_gpu
