// Device memory, peers.
#include "fake.h"

#include <sys/mman.h>

#define GARBAGE 0xa5

void * map_pages(size_t bytes) {
    void * memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

// Real memory comes with what was there before. Large blocks get it in places, to stay cheap.
static void spoil(unsigned char * memory, size_t bytes) {
    size_t whole = bytes < 4 * MIB ? bytes : MIB;
    memset(memory, GARBAGE, whole);
    for (size_t i = whole; i < bytes; i += MIB) {
        memory[i] = GARBAGE;
    }
    if (bytes) {
        memory[bytes - 1] = GARBAGE;
    }
}

int core_alloc(void ** out, size_t bytes, int device) {
    if (!out || !bytes) {
        return INVALID_VALUE;
    }
    pthread_mutex_lock(&fake_lock);
    int code = OUT_OF_MEMORY;
    if (bytes <= fake_vram_mib * MIB && vram_used[device] + bytes <= fake_vram_mib * MIB) {
        void * memory = map_pages(bytes);
        if (memory) {
            spoil(memory, bytes);
            range_add((uintptr_t) memory, bytes, DEVICE, device);
            vram_used[device] += bytes;
            count_live_allocations++;
            *out = memory;
            code = OK;
        }
    }
    pthread_mutex_unlock(&fake_lock);
    return code;
}

// Waits for the device first, as real ones do; freeing pinned memory (pinned.c) does not.
int core_free(void * address) {
    if (!address) {
        return OK;
    }
    pthread_mutex_lock(&fake_lock);
    Range * range = range_beginning((uintptr_t) address, DEVICE);
    int device = range ? range->device : 0;
    pthread_mutex_unlock(&fake_lock);
    if (!range) {
        return INVALID_VALUE;
    }
    streams_synchronize(device);
    pthread_rwlock_wrlock(&fake_touch);
    pthread_mutex_lock(&fake_lock);
    range = range_beginning((uintptr_t) address, DEVICE);
    if (range) {
        munmap(address, range->bytes);
        vram_used[range->device] -= range->bytes;
        count_live_allocations--;
        range_drop(range);
    }
    pthread_mutex_unlock(&fake_lock);
    pthread_rwlock_unlock(&fake_touch);
    return range ? OK : INVALID_VALUE;
}

int core_memory_info(size_t * free_bytes, size_t * total, int device) {
    pthread_mutex_lock(&fake_lock);
    *total = fake_vram_mib * MIB;
    *free_bytes = *total - vram_used[device];
    pthread_mutex_unlock(&fake_lock);
    return OK;
}

int core_can_access(int device, int peer) { return device != peer; }
