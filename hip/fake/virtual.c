// Virtual memory management: physical memory is a memfd, a mapping is a mapping of it.
#include "fake.h"

#include <sys/mman.h>
#include <unistd.h>

#define ALIGNMENT (2 * MIB)
#define NOTHING (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

static int is_device_memory(const Properties * properties) {
    return properties && properties->type == 1 && properties->location.type == 1 && properties->location.id >= 0 &&
           properties->location.id < fake_devices;
}

int core_granularity(size_t * out, const Properties * properties) {
    if (!fake_vmm) {
        return NOT_SUPPORTED;
    }
    if (!out || !is_device_memory(properties)) {
        return INVALID_VALUE;
    }
    *out = (size_t) fake_granularity;
    return OK;
}

int core_reserve(void ** out, size_t bytes) {
    if (!fake_vmm) {
        return NOT_SUPPORTED;
    }
    if (!out || !bytes || bytes % fake_granularity) {
        return INVALID_VALUE;
    }
    char * raw = mmap(NULL, bytes + ALIGNMENT, PROT_NONE, NOTHING, -1, 0);
    if (raw == MAP_FAILED) {
        return OUT_OF_MEMORY;
    }
    char * begin = (char *) (((uintptr_t) raw + ALIGNMENT - 1) & ~(uintptr_t) (ALIGNMENT - 1));
    if (begin > raw) {
        munmap(raw, begin - raw);
    }
    if (raw + ALIGNMENT > begin) {
        munmap(begin + bytes, raw + ALIGNMENT - begin);
    }
    pthread_mutex_lock(&fake_lock);
    range_add((uintptr_t) begin, bytes, RESERVED, 0);
    count_live_reservations++;
    pthread_mutex_unlock(&fake_lock);
    *out = begin;
    return OK;
}

int core_unreserve(void * address, size_t bytes) {
    pthread_rwlock_wrlock(&fake_touch);
    pthread_mutex_lock(&fake_lock);
    Range * range = range_beginning((uintptr_t) address, RESERVED);
    int code = OK;
    if (!range || range->bytes != bytes || range_overlaps(range->begin, bytes, MAPPED)) {
        code = INVALID_VALUE;
    } else {
        munmap(address, bytes);
        vram_used[range->device] -= range->held_bytes;
        count_live_reservations--;
        range_drop(range);
    }
    pthread_mutex_unlock(&fake_lock);
    pthread_rwlock_unlock(&fake_touch);
    return code;
}

// Physical memory comes with what was there before: here, in its first and last page.
static int spoil(int fd, size_t bytes) {
    static unsigned char garbage[PAGE];
    memset(garbage, 0xa5, sizeof garbage);
    return pwrite(fd, garbage, PAGE, 0) == (ssize_t) PAGE &&
           pwrite(fd, garbage, PAGE, (off_t) (bytes - PAGE)) == (ssize_t) PAGE;
}

int core_create(Handle ** out, size_t bytes, const Properties * properties) {
    if (!fake_vmm) {
        return NOT_SUPPORTED;
    }
    if (!out || !bytes || bytes % fake_granularity || !is_device_memory(properties)) {
        return INVALID_VALUE;
    }
    int device = properties->location.id, code = OUT_OF_MEMORY;
    pthread_mutex_lock(&fake_lock);
    int handles_left = !fake_handle_limit || count_live_handles < fake_handle_limit;
    if (handles_left && vram_used[device] + bytes <= fake_vram_mib * MIB) {
        int fd = memfd_create("expertier-fake-vram", MFD_CLOEXEC);
        if (fd >= 0 && !ftruncate(fd, (off_t) bytes) && spoil(fd, bytes)) {
            Handle * handle = calloc(1, sizeof *handle);
            *handle = (Handle){ .fd = fd, .device = device, .references = 1, .user_references = 1, .bytes = bytes };
            vram_used[device] += bytes;
            count_live_handles++;
            *out = handle;
            code = OK;
        } else if (fd >= 0) {
            close(fd);
        }
    }
    pthread_mutex_unlock(&fake_lock);
    return code;
}

static void drop_reference(Handle * handle) {
    if (--handle->references) {
        return;
    }
    close(handle->fd);
    vram_used[handle->device] -= handle->bytes;
    count_live_handles--;
    free(handle);
}

int core_release(Handle * handle) {
    if (!handle) {
        return INVALID_VALUE;
    }
    pthread_mutex_lock(&fake_lock);
    int code = handle->user_references-- > 0 ? OK : INVALID_VALUE;
    if (!code) {
        drop_reference(handle);
    }
    pthread_mutex_unlock(&fake_lock);
    return code;
}

int core_map(void * address, size_t bytes, size_t offset, Handle * handle) {
    uintptr_t begin = (uintptr_t) address;
    if (!handle || offset || bytes != handle->bytes || begin % fake_granularity) {
        return INVALID_VALUE;
    }
    pthread_mutex_lock(&fake_lock);
    Range * reservation = range_at(begin, RESERVED);
    int code = INVALID_VALUE;
    if (reservation && begin + bytes <= reservation->begin + reservation->bytes &&
        !range_overlaps(begin, bytes, MAPPED)) {
        code = OUT_OF_MEMORY;
        if (mmap(address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->fd, 0) != MAP_FAILED) {
            Range * range = range_add(begin, bytes, MAPPED, handle->device);
            range->handle = handle;
            handle->references++;
            code = OK;
        }
    }
    pthread_mutex_unlock(&fake_lock);
    return code;
}

int core_unmap(void * address, size_t bytes, int device) {
    if (!fake_unfenced_unmap) {
        int code = streams_synchronize(device);
        if (code) {
            return code;
        }
    }
    uintptr_t begin = (uintptr_t) address;
    pthread_rwlock_wrlock(&fake_touch);
    pthread_mutex_lock(&fake_lock);
    int code = OK;
    Range * first = range_at(begin, MAPPED);
    if (!first) {
        code = INVALID_VALUE;
    } else if (fake_whole_unmap_only && (first->begin != begin || first->bytes != bytes)) {
        code = INVALID_VALUE;
    }
    for (uintptr_t at = begin; !code && at < begin + bytes;) {
        Range * range = range_at(at, MAPPED);
        if (!range || range->begin != at || at + range->bytes > begin + bytes) {
            code = INVALID_VALUE;
            break;
        }
        mmap((void *) at, range->bytes, PROT_NONE, NOTHING | MAP_FIXED, -1, 0);
        at += range->bytes;
        Range * reservation = range_at(range->begin, RESERVED);
        Handle * handle = range->handle;
        range_drop(range);
        if (fake_vram_stays_reserved) {
            // The memory stays charged to the reservation, whatever happens to the handle.
            reservation->held_bytes += handle->bytes;
            reservation->device = handle->device;
            vram_used[handle->device] += handle->bytes;
        }
        drop_reference(handle);
    }
    pthread_mutex_unlock(&fake_lock);
    pthread_rwlock_unlock(&fake_touch);
    return code;
}

int core_set_access(void * address, size_t bytes, const Access * access, size_t n) {
    if (!access || !n) {
        return INVALID_VALUE;
    }
    uintptr_t begin = (uintptr_t) address;
    pthread_mutex_lock(&fake_lock);
    Range * reservation = range_at(begin, RESERVED);
    int code = reservation ? OK : INVALID_VALUE;
    if (!code && fake_first_mapping_only && begin != reservation->begin) {
        code = INVALID_VALUE;
    }
    for (uintptr_t at = begin; !code && at < begin + bytes;) {
        Range * range = range_at(at, MAPPED);
        if (!range) {
            code = INVALID_VALUE;
        } else {
            at = range->begin + range->bytes;
        }
    }
    for (size_t i = 0; i < n && !code; i++) {
        if (access[i].location.type != 1 || access[i].location.id < 0 || access[i].location.id >= fake_devices) {
            code = INVALID_DEVICE;
        }
    }
    for (uintptr_t at = begin; !code && at < begin + bytes;) {
        Range * range = range_at(at, MAPPED);
        for (size_t i = 0; i < n && !code; i++) {
            int device = access[i].location.id;
            if (device != range->device && !core_can_access(device, range->device)) {
                code = PEER_UNSUPPORTED;
            } else if (access[i].flags == 3) {
                range->access |= 1u << device;
            } else {
                range->access &= ~(1u << device);
            }
            if (fake_owner_last && i + 1 == n && device != range->device) {
                range->access &= ~(1u << range->device);
            }
        }
        mprotect((void *) range->begin, range->bytes, range->access ? PROT_READ | PROT_WRITE : PROT_NONE);
        at = range->begin + range->bytes;
    }
    pthread_mutex_unlock(&fake_lock);
    return code;
}
