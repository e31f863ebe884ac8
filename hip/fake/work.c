// What streams do: copies, fills, kernels. A copy that a device may not make is a fault of the device, as on hardware:
// later work does not run, and calls return the fault until the process ends (or a test resets the fake).
#include "fake.h"

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static void fault(int device) {
    pthread_mutex_lock(&fake_lock);
    if (!device_fault[device]) {
        device_fault[device] = ILLEGAL_ADDRESS;
    }
    count_faults++;
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
}

static double seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double) time.tv_sec + (double) time.tv_nsec * 1e-9;
}

// Sides over the link may be memory of the host that nobody pinned, as long as it is there.
static int may(const void * address, size_t bytes, int device, int over_link) {
    if (device_may((uintptr_t) address, bytes, device)) {
        return 1;
    }
    if (!over_link || !is_host_pageable((uintptr_t) address)) {
        return 0;
    }
    uintptr_t first = (uintptr_t) address & ~(PAGE - 1);
    return !msync((void *) first, (uintptr_t) address + bytes - first, MS_ASYNC);
}

static void copy(const Work * work) {
    pthread_mutex_lock(&fake_lock);
    int allowed = may(work->target, work->bytes, work->device, work->over_link) &&
                  may(work->source, work->bytes, work->device, work->over_link);
    int stale = allowed && fake_stale_reads && take_stale_read((uintptr_t) work->source);
    pthread_mutex_unlock(&fake_lock);
    if (!allowed) {
        fault(work->device);
        return;
    }
    if (stale) {
        memset(work->target, 0, work->bytes);
    } else {
        memmove(work->target, work->source, work->bytes);
    }
}

// Gives whole pages back to the system, which has zeros for their next use: large memory stays cheap.
static void clear(char * begin, size_t bytes) {
    char * end = begin + bytes;
    char *first = (char *) (((uintptr_t) begin + PAGE - 1) & ~(PAGE - 1)),
         *last = (char *) ((uintptr_t) end & ~(PAGE - 1));
    memset(begin, 0, (size_t) (first - begin));
    memset(last, 0, (size_t) (end - last));
    // A mapping is of a memfd, whose pages must be removed; a plain allocation is private.
    size_t middle = (size_t) (last - first);
    if (madvise(first, middle, MADV_REMOVE) && madvise(first, middle, MADV_DONTNEED)) {
        memset(first, 0, middle);
    }
}

static void fill(const Work * work) {
    pthread_mutex_lock(&fake_lock);
    int allowed = device_may((uintptr_t) work->target, work->bytes, work->device);
    pthread_mutex_unlock(&fake_lock);
    if (!allowed) {
        fault(work->device);
    } else if (work->value || work->bytes < MIB) {
        memset(work->target, work->value, work->bytes);
    } else {
        clear(work->target, work->bytes);
    }
}

void work_run(Work * work) {
    unsigned warp = (unsigned) (fake_warp_size ? fake_warp_size : fake_default_warp);
    double start = seconds();
    pthread_rwlock_rdlock(&fake_touch);
    switch (work->kind) {
    case COPY:
        copy(work);
        break;
    case FILL:
        fill(work);
        break;
    case LAUNCH:
        work->function->run(work->arguments, work->grid, work->block, warp);
        work->arguments = NULL; // the kernel's own code frees them
        break;
    default:
        break;
    }
    pthread_rwlock_unlock(&fake_touch);
    if (work->kind == CALLBACK) {
        work->callback(work->target);
    }
    if (work->kind == COPY && work->over_link && fake_link_mbps > 0) {
        double left = (double) work->bytes / ((double) fake_link_mbps * 1e6) - (seconds() - start);
        if (left > 0) {
            usleep((useconds_t) (left * 1e6));
        }
    }
}

int work_copy(void * target, const void * source, size_t bytes, int over_link, Stream * stream, int device) {
    if (!bytes) {
        return OK;
    }
    pthread_mutex_lock(&fake_lock);
    int pageable = over_link && (is_host_pageable((uintptr_t) target) || is_host_pageable((uintptr_t) source));
    count_pageable_copies += pageable;
    if (over_link) {
        int to_host = !range_at((uintptr_t) target, DEVICE | RESERVED);
        to_host ? count_copies_out++ : count_copies_in++;
        if (!to_host) {
            count_bytes_in += (long long) bytes;
        }
    } else {
        count_copies_within++;
    }
    pthread_mutex_unlock(&fake_lock);
    int code =
        stream_push(stream, device,
                    (Work){ .kind = COPY, .target = target, .source = source, .bytes = bytes, .over_link = over_link });
    if (!code && pageable && fake_pageable_synchronous) {
        code = stream_synchronize(stream, device);
    }
    return code;
}

int work_fill(void * target, int value, size_t bytes, Stream * stream, int device) {
    if (!bytes) {
        return OK;
    }
    return stream_push(stream, device, (Work){ .kind = FILL, .target = target, .value = value, .bytes = bytes });
}
