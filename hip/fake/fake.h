// The fake driver's core, which the names of HIP (hip_names.c) and CUDA (cuda_names.c) are put on.
//
// Device memory is memory of this process. One lock guards all state; streams are threads that take their work from
// queues and do it without the lock. Codes are those that both vendors share.
#pragma once
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    PEER_UNSUPPORTED = 217,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    CONTEXT_IS_DESTROYED = 709,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
};

#define DEVICES 8
#define MIB (1ull << 20)
#define PAGE 4096ull

// -- settings.c: switches and counters by name, and calls that fail on purpose ---------------------------------------

// name, default. Environment: EXPERTIER_FAKE_ and the name in capitals.
// clang-format off
#define SETTINGS(X)                                                                                                    \
    X(devices, 1)                                                                                                      \
    X(vram_mib, 1024)             /* of each device */                                                                 \
    X(pinned_mib, 1 << 20)        /* of the host */                                                                    \
    X(link_mbps, 0)               /* megabytes a second of copies to and from the host; 0: as fast as memory */        \
    X(jitter_us, 0)               /* each piece of work waits a random time up to this */                              \
    X(seed, 1)                                                                                                         \
    X(version, 0)                 /* what the driver says; 0: new enough */                                            \
    X(warp_size, 0)               /* 0: 64 for HIP, 32 for CUDA */                                                     \
    X(granularity, 2 << 20)       /* of virtual memory, as reported */                                                 \
    X(vmm, 1)                     /* whether there is virtual memory management */                                     \
    X(first_mapping_only, 0)      /* access can be set only from a reservation's base */                               \
    X(vram_stays_reserved, 0)     /* memory returns only when the address range does */                                \
    X(stale_reads, 0)             /* so many first reads of a mapping see zeros */                                     \
    X(handle_limit, 0)            /* so many handles of physical memory; 0: any number */                              \
    X(unfenced_unmap, 0)          /* unmapping does not wait for streams */                                            \
    X(whole_unmap_only, 1)        /* a part of a mapping cannot be unmapped */                                         \
    X(owner_last, 0)              /* access of the owner is lost unless it is granted last */                          \
    X(pageable_synchronous, 1)    /* copies from or to memory that is not pinned block the caller */                   \
    X(pinned_fails, 0)            /* no pinned memory at all */                                                        \
    X(pinned_misaligned, 0)       /* pinned memory begins in the middle of a page */                                   \
    X(pinned_slabs, 1)            /* pinned memory below 2 MiB is cut from slabs of 2 MiB */                           \
    X(pinned_step, 4096)          /* in steps of so many bytes, a multiple of 512 */                                   \
    X(contexts_end, 0)            /* without users CUDA's contexts end: memory goes, and calls say so */               \
    X(held, 0)                    /* streams take no work while this is set */
// clang-format on

// clang-format off
#define COUNTERS(X)                                                                                                    \
    X(live_allocations) X(live_pinned) X(live_registered) X(live_handles) X(live_reservations) X(live_streams)         \
    X(live_events) X(live_modules) X(live_contexts) X(pageable_copies) X(copies_in) X(copies_out) X(copies_within) X(launches)          \
    X(bytes_in) X(faults) X(pinned_bytes)  /* pinned_bytes: what the host has less of, registered memory included */
// clang-format on

#define DECLARE(name, ...) extern long long fake_##name;
SETTINGS(DECLARE)
#undef DECLARE
#define DECLARE(name) extern long long count_##name;
COUNTERS(DECLARE)
#undef DECLARE

extern pthread_mutex_t fake_lock;
extern pthread_cond_t fake_changed;
extern pthread_rwlock_t
    fake_touch; // read while work touches memory, written to take memory away; taken before fake_lock

void fake_read_settings(void);     // reads the environment, once
int fake_begin(const char * call); // 0, or the code that this call must fail with
extern int fake_default_version, fake_default_warp;

// -- ranges.c: who owns which addresses ------------------------------------------------------------------------------

enum { DEVICE = 1, PINNED = 2, REGISTERED = 4, RESERVED = 8, MAPPED = 16 };

typedef struct Handle {
    int fd, device, references, user_references;
    size_t bytes;
} Handle;

typedef struct Range {
    uintptr_t begin;
    size_t bytes, raw_offset, slab_units;
    int kind, device;
    unsigned access;    // MAPPED: a bit for each device
    int reads;          // MAPPED: reads so far
    struct Slab * slab; // PINNED: what it was cut from, slab_units of it
    size_t held_bytes;  // RESERVED: VRAM that stays taken until the range goes
    Handle * handle;
    struct Range * next;
} Range;

extern size_t vram_used[DEVICES];

Range * range_add(uintptr_t begin, size_t bytes, int kind, int device);
Range * range_at(uintptr_t address, int kinds);
Range * range_of_kind(int kind); // any; NULL where there is none // that contains the address
Range * range_beginning(uintptr_t address, int kinds);
int range_overlaps(uintptr_t begin, size_t bytes, int kinds);
void range_drop(Range * range);
int device_may(uintptr_t address, size_t bytes, int device); // whether a device may touch all of it
int is_host_pageable(uintptr_t address);
int take_stale_read(uintptr_t address); // whether a read here sees zeros

// -- memory.c, pinned.c, virtual.c -----------------------------------------------------------------------------------

void * map_pages(size_t bytes);
int core_alloc(void ** out, size_t bytes, int device);
int core_free(void * address);
int core_host_alloc(void ** out, size_t bytes);
int core_host_free(void * address);
int core_register(void * address, size_t bytes);
int core_unregister(void * address);
int core_host_pointer(void ** out, void * address);
int core_memory_info(size_t * free_bytes, size_t * total, int device);
int core_can_access(int device, int peer);

typedef struct {
    int type, id;
} Location;
typedef struct {
    int type, handle_types;
    Location location;
    void * metadata;
    unsigned char flags[8];
} Properties;
typedef struct {
    Location location;
    int flags;
} Access;

int core_granularity(size_t * out, const Properties * properties);
int core_reserve(void ** out, size_t bytes);
int core_unreserve(void * address, size_t bytes);
int core_create(Handle ** out, size_t bytes, const Properties * properties);
int core_release(Handle * handle);
int core_map(void * address, size_t bytes, size_t offset, Handle * handle);
int core_unmap(void * address, size_t bytes, int device);
int core_set_access(void * address, size_t bytes, const Access * access, size_t n);

// -- streams.c: queues of work ---------------------------------------------------------------------------------------

typedef struct Stream Stream;
typedef struct Event Event;
typedef struct Function {
    void * (*pack)(void **);
    void (*run)(void *, const unsigned *, const unsigned *, unsigned);
} Function;
enum { COPY, FILL, RECORD, WAIT, LAUNCH, CALLBACK };

typedef struct Work {
    int kind, device;
    void * target;
    const void * source;
    size_t bytes;
    int value, over_link;
    Event * event;
    unsigned long generation, number;
    Function * function;
    void * arguments;
    unsigned grid[3], block[3];
    void (*callback)(void *);
    struct Work * next;
} Work;

int stream_create(Stream ** out, int device, unsigned flags, int priority);
int stream_destroy(Stream * stream);
int stream_synchronize(Stream * stream, int device); // NULL and the two special handles: the device's stream 0
int stream_query(Stream * stream, int device);
int stream_flags(Stream * stream, int device, unsigned * flags, int * priority);
int stream_push(Stream * stream, int device, Work work);
int streams_synchronize(int device);
int event_create(Event ** out, int timing);
int event_destroy(Event * event);
int event_record(Event * event, Stream * stream, int device);
int event_query(Event * event);
int event_synchronize(Event * event);
int event_wait(Stream * stream, int device, Event * event);
extern int device_fault[DEVICES];

// -- work.c: what the work does; modules.c ---------------------------------------------------------------------------

void work_run(Work * work);
int work_copy(void * target, const void * source, size_t bytes, int over_link, Stream * stream, int device);
int work_fill(void * target, int value, size_t bytes, Stream * stream, int device);
int module_load(void ** out, const void * image);
int module_unload(void * module);
int module_function(Function ** out, void * module, const char * name);
int module_launch(Function * function, const unsigned * grid, const unsigned * block, void ** arguments,
                  Stream * stream, int device);
