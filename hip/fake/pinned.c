// Pinned memory: allocated, small pieces cut from slabs; and registered.
#include "fake.h"

#include <sys/mman.h>

#define SLAB_BYTES (2 * MIB)
#define SLAB_PAGES (SLAB_BYTES / PAGE)

// Lives while a piece of it does.
typedef struct Slab {
    char * memory;
    unsigned char taken[SLAB_PAGES];
    size_t n_taken;
    struct Slab * next;
} Slab;

static Slab * slabs;

static int host_lacks(size_t bytes) {
    size_t limit = (size_t) fake_pinned_mib * MIB;
    return fake_pinned_fails || bytes > limit || (size_t) count_pinned_bytes + bytes > limit;
}

// The first run of free pages; SLAB_PAGES where none is long enough.
static size_t free_run(const Slab * slab, size_t pages) {
    size_t run = 0;
    for (size_t i = 0; i < SLAB_PAGES; i++) {
        run = slab->taken[i] ? 0 : run + 1;
        if (run == pages) {
            return i + 1 - pages;
        }
    }
    return SLAB_PAGES;
}

static void * cut_from_slab(size_t pages, Slab ** out) {
    Slab * slab = slabs;
    while (slab && free_run(slab, pages) == SLAB_PAGES) {
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
    size_t first = free_run(slab, pages);
    memset(slab->taken + first, 1, pages);
    slab->n_taken += pages;
    *out = slab;
    return slab->memory + first * PAGE;
}

static void return_to_slab(Slab * slab, const char * address, size_t pages) {
    memset(slab->taken + (address - slab->memory) / PAGE, 0, pages);
    slab->n_taken -= pages;
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
    size_t shift = fake_pinned_misaligned ? PAGE / 2 : 0, pages = bytes / PAGE + (bytes % PAGE != 0);
    int from_slab = fake_pinned_slabs && !shift && bytes < SLAB_BYTES;
    Slab * slab = NULL;
    char * memory = NULL;
    if (from_slab && !fake_pinned_fails) {
        memory = cut_from_slab(pages, &slab);
    } else if (!host_lacks(bytes)) {
        memory = map_pages(bytes + shift);
    }
    if (memory) {
        Range * range = range_add((uintptr_t) memory + shift, bytes, PINNED, 0);
        range->raw_offset = shift;
        range->slab = slab;
        range->slab_pages = pages;
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
            return_to_slab(range->slab, address, range->slab_pages);
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
