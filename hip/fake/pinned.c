// Pinned memory: allocated, small pieces cut from slabs; and registered.
#include "fake.h"

#include <sys/mman.h>

#define SLAB_BYTES (2 * MIB)
#define UNIT 512ull
#define SLAB_UNITS (SLAB_BYTES / UNIT)

// Lives while a piece of it does.
typedef struct Slab {
    char * memory;
    unsigned char taken[SLAB_UNITS];
    size_t n_taken;
    struct Slab * next;
} Slab;

static Slab * slabs;

static int host_lacks(size_t bytes) {
    size_t limit = (size_t) fake_pinned_mib * MIB;
    return fake_pinned_fails || bytes > limit || (size_t) count_pinned_bytes + bytes > limit;
}

// The first run of free units; SLAB_UNITS where none is long enough.
static size_t free_run(const Slab * slab, size_t units) {
    size_t run = 0;
    for (size_t i = 0; i < SLAB_UNITS; i++) {
        run = slab->taken[i] ? 0 : run + 1;
        if (run == units) {
            return i + 1 - units;
        }
    }
    return SLAB_UNITS;
}

static void * cut_from_slab(size_t units, Slab ** out) {
    Slab * slab = slabs;
    while (slab && free_run(slab, units) == SLAB_UNITS) {
        slab = slab->next;
    }
    if (!slab) {
        char * memory = host_lacks(SLAB_BYTES) ? NULL : map_pages(SLAB_BYTES);
        if (!memory) {
            return NULL;
        }
        slab = calloc(1, sizeof *slab);
        slab->memory = memory;
        slab->next = slabs;
        slabs = slab;
        count_pinned_bytes += SLAB_BYTES;
    }
    size_t first = free_run(slab, units);
    memset(slab->taken + first, 1, units);
    slab->n_taken += units;
    *out = slab;
    return slab->memory + first * UNIT;
}

static void return_to_slab(Slab * slab, const char * address, size_t units) {
    memset(slab->taken + (address - slab->memory) / UNIT, 0, units);
    slab->n_taken -= units;
    if (slab->n_taken) {
        return;
    }
    for (Slab ** place = &slabs; *place; place = &(*place)->next) {
        if (*place == slab) {
            *place = slab->next;
            break;
        }
    }
    munmap(slab->memory, SLAB_BYTES);
    count_pinned_bytes -= SLAB_BYTES;
    free(slab);
}

int core_host_alloc(void ** out, size_t bytes) {
    if (!out || !bytes) {
        return INVALID_VALUE;
    }
    pthread_mutex_lock(&fake_lock);
    size_t shift = fake_pinned_misaligned ? PAGE / 2 : 0, step = (size_t) fake_pinned_step;
    size_t units = (bytes + step - 1) / step * step / UNIT;
    int from_slab = fake_pinned_slabs && !shift && bytes < SLAB_BYTES;
    Slab * slab = NULL;
    char * memory = NULL;
    if (from_slab && !fake_pinned_fails) {
        memory = cut_from_slab(units, &slab);
    } else if (!host_lacks(bytes)) {
        memory = map_pages(bytes + shift);
    }
    if (memory) {
        Range * range = range_add((uintptr_t) memory + shift, bytes, PINNED, 0);
        range->raw_offset = shift;
        range->slab = slab;
        range->slab_units = units;
        if (!slab) {
            count_pinned_bytes += bytes;
        }
        count_live_pinned++;
        *out = memory + shift;
    }
    pthread_mutex_unlock(&fake_lock);
    return memory ? OK : OUT_OF_MEMORY;
}

int core_host_free(void * address) {
    if (!address) {
        return OK;
    }
    pthread_rwlock_wrlock(&fake_touch);
    pthread_mutex_lock(&fake_lock);
    Range * range = range_beginning((uintptr_t) address, PINNED);
    if (range) {
        if (range->slab) {
            return_to_slab(range->slab, address, range->slab_units);
        } else {
            munmap((char *) address - range->raw_offset, range->bytes + range->raw_offset);
            count_pinned_bytes -= range->bytes;
        }
        count_live_pinned--;
        range_drop(range);
    }
    pthread_mutex_unlock(&fake_lock);
    pthread_rwlock_unlock(&fake_touch);
    return range ? OK : INVALID_VALUE;
}

int core_register(void * address, size_t bytes) {
    if (!address || !bytes) {
        return INVALID_VALUE;
    }
    pthread_mutex_lock(&fake_lock);
    int code = OK;
    if (range_overlaps((uintptr_t) address, bytes, PINNED | REGISTERED)) {
        code = ALREADY_REGISTERED;
    } else if (host_lacks(bytes)) {
        code = OUT_OF_MEMORY;
    } else {
        range_add((uintptr_t) address, bytes, REGISTERED, 0);
        count_pinned_bytes += bytes;
        count_live_registered++;
    }
    pthread_mutex_unlock(&fake_lock);
    return code;
}

int core_unregister(void * address) {
    pthread_mutex_lock(&fake_lock);
    Range * range = range_beginning((uintptr_t) address, REGISTERED);
    if (range) {
        count_pinned_bytes -= range->bytes;
        count_live_registered--;
        range_drop(range);
    }
    pthread_mutex_unlock(&fake_lock);
    return range ? OK : NOT_REGISTERED;
}

int core_host_pointer(void ** out, void * address) {
    pthread_mutex_lock(&fake_lock);
    Range * range = range_at((uintptr_t) address, PINNED | REGISTERED);
    pthread_mutex_unlock(&fake_lock);
    if (!range) {
        return INVALID_VALUE;
    }
    *out = address;
    return OK;
}
