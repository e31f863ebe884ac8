// Who owns which addresses. All functions want the lock held.
#include "fake.h"

static Range * ranges;
size_t vram_used[DEVICES];

Range * range_add(uintptr_t begin, size_t bytes, int kind, int device) {
    Range * range = calloc(1, sizeof *range);
    range->begin = begin;
    range->bytes = bytes;
    range->kind = kind;
    range->device = device;
    range->next = ranges;
    ranges = range;
    return range;
}

Range * range_at(uintptr_t address, int kinds) {
    for (Range * range = ranges; range; range = range->next) {
        if ((range->kind & kinds) && address >= range->begin && address - range->begin < range->bytes) {
            return range;
        }
    }
    return NULL;
}

Range * range_of_kind(int kind) {
    Range * range = ranges;
    while (range && range->kind != kind) {
        range = range->next;
    }
    return range;
}

Range * range_beginning(uintptr_t address, int kinds) {
    for (Range * range = ranges; range; range = range->next) {
        if ((range->kind & kinds) && range->begin == address) {
            return range;
        }
    }
    return NULL;
}

int range_overlaps(uintptr_t begin, size_t bytes, int kinds) {
    for (Range * range = ranges; range; range = range->next) {
        if ((range->kind & kinds) && range->begin < begin + bytes && begin < range->begin + range->bytes) {
            return 1;
        }
    }
    return 0;
}

void range_drop(Range * gone) {
    for (Range ** place = &ranges; *place; place = &(*place)->next) {
        if (*place == gone) {
            *place = gone->next;
            free(gone);
            return;
        }
    }
}

static int allowed(const Range * range, int device) {
    if (range->kind == MAPPED) {
        return range->access >> device & 1;
    }
    if (range->kind == DEVICE) {
        return range->device == device;
    }
    return 1;
}

int device_may(uintptr_t address, size_t bytes, int device) {
    while (bytes) {
        Range * range = range_at(address, DEVICE | PINNED | REGISTERED | MAPPED);
        if (!range || !allowed(range, device)) {
            return 0;
        }
        size_t here = range->begin + range->bytes - address;
        if (here >= bytes) {
            return 1;
        }
        // Only mappings of one reservation continue each other.
        if (range->kind != MAPPED) {
            return 0;
        }
        address += here;
        bytes -= here;
    }
    return 1;
}

int is_host_pageable(uintptr_t address) { return !range_at(address, DEVICE | PINNED | REGISTERED | RESERVED | MAPPED); }

int take_stale_read(uintptr_t address) {
    Range * range = range_at(address, MAPPED);
    return range && range->reads++ < fake_stale_reads;
}
