// Streams: a thread and a queue each. Work is taken in order, when nothing that it must wait for is open.
#include "fake.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define NON_BLOCKING 1u

struct Event {
    unsigned long recorded, done;
    int references, timing;
    double time;
};

struct Stream {
    pthread_t thread;
    Work *first, *last; // `first` stays in the queue while it is being done
    int device, priority, quits;
    unsigned flags, random;
    struct Stream * next;
};

int device_fault[DEVICES];
static Stream * streams; // all of them, stream 0 of each device included
static Stream * zero_of[DEVICES];
static unsigned long last_number;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double) time.tv_sec + (double) time.tv_nsec * 1e-9;
}

static void event_unref(Event * event) {
    if (event && --event->references == 0) {
        free(event);
    }
}

// Stream 0 waits for what blocking streams were given before, and they for it.
static int must_wait_for_other_streams(const Stream * stream, const Work * work) {
    if (stream->flags & NON_BLOCKING) {
        return 0;
    }
    int is_zero = stream == zero_of[stream->device];
    for (Stream * other = streams; other; other = other->next) {
        if (other == stream || other->device != stream->device || (other->flags & NON_BLOCKING) || !other->first) {
            continue;
        }
        if ((is_zero || other == zero_of[stream->device]) && other->first->number < work->number) {
            return 1;
        }
    }
    return 0;
}

static int can_start(const Stream * stream) {
    const Work * work = stream->first;
    if (!work || fake_held) {
        return 0;
    }
    if (work->kind == WAIT && work->event->done < work->generation && !device_fault[work->device]) {
        return 0;
    }
    return !must_wait_for_other_streams(stream, work);
}

static void * serve(void * argument) {
    Stream * stream = argument;
    pthread_mutex_lock(&fake_lock);
    for (;;) {
        while (!can_start(stream) && !(stream->quits && !stream->first)) {
            pthread_cond_wait(&fake_changed, &fake_lock);
        }
        Work * work = stream->first;
        if (!work) {
            break;
        }
        int runs = !device_fault[work->device];
        long long jitter = fake_jitter_us;
        stream->random = stream->random * 1664525u + 1013904223u + (unsigned) fake_seed;
        pthread_mutex_unlock(&fake_lock);
        if (jitter) {
            usleep((useconds_t) (stream->random >> 8) % (useconds_t) (jitter + 1));
        }
        if (runs) {
            work_run(work);
        }
        pthread_mutex_lock(&fake_lock);
        if (work->kind == RECORD && work->generation > work->event->done) {
            work->event->done = work->generation;
            work->event->time = now();
        }
        stream->first = work->next;
        if (!stream->first) {
            stream->last = NULL;
        }
        event_unref(work->event);
        free(work->arguments);
        free(work);
        pthread_cond_broadcast(&fake_changed);
    }
    pthread_mutex_unlock(&fake_lock);
    return NULL;
}

// Wants the lock.
static Stream * make(int device, unsigned flags, int priority) {
    Stream * stream = calloc(1, sizeof *stream);
    stream->device = device;
    stream->flags = flags;
    stream->priority = priority;
    stream->random = (unsigned) last_number * 2654435761u + (unsigned) fake_seed;
    stream->next = streams;
    streams = stream;
    pthread_create(&stream->thread, NULL, serve, stream);
    return stream;
}

// Wants the lock. NULL for a handle that is none.
static Stream * find(Stream * handle, int device) {
    if ((uintptr_t) handle <= 2) { // NULL, legacy and per-thread
        if (!zero_of[device]) {
            zero_of[device] = make(device, 0, 0);
        }
        return zero_of[device];
    }
    for (Stream * stream = streams; stream; stream = stream->next) {
        if (stream == handle) {
            return stream;
        }
    }
    return NULL;
}

int stream_create(Stream ** out, int device, unsigned flags, int priority) {
    if (!out) {
        return INVALID_VALUE;
    }
    pthread_mutex_lock(&fake_lock);
    *out = make(device, flags, priority);
    count_live_streams++;
    pthread_mutex_unlock(&fake_lock);
    return OK;
}

int stream_destroy(Stream * handle) {
    pthread_mutex_lock(&fake_lock);
    Stream * stream = (uintptr_t) handle > 2 ? find(handle, 0) : NULL;
    if (stream) {
        stream->quits = 1;
        count_live_streams--;
        pthread_cond_broadcast(&fake_changed);
    }
    pthread_mutex_unlock(&fake_lock);
    if (!stream) {
        return INVALID_HANDLE;
    }
    pthread_join(stream->thread, NULL);
    pthread_mutex_lock(&fake_lock);
    for (Stream ** place = &streams; *place; place = &(*place)->next) {
        if (*place == stream) {
            *place = stream->next;
            break;
        }
    }
    pthread_mutex_unlock(&fake_lock);
    free(stream);
    return OK;
}

int stream_flags(Stream * handle, int device, unsigned * flags, int * priority) {
    pthread_mutex_lock(&fake_lock);
    Stream * stream = find(handle, device);
    if (stream && flags) {
        *flags = stream->flags;
    }
    if (stream && priority) {
        *priority = stream->priority;
    }
    pthread_mutex_unlock(&fake_lock);
    return stream ? OK : INVALID_HANDLE;
}

int stream_push(Stream * handle, int device, Work work) {
    pthread_mutex_lock(&fake_lock);
    Stream * stream = find(handle, device);
    if (stream) {
        Work * queued = malloc(sizeof work);
        work.number = ++last_number;
        work.device = stream->device;
        work.next = NULL;
        if (work.event) {
            work.event->references++;
        }
        *queued = work;
        if (stream->last) {
            stream->last->next = queued;
        } else {
            stream->first = queued;
        }
        stream->last = queued;
        pthread_cond_broadcast(&fake_changed);
    }
    pthread_mutex_unlock(&fake_lock);
    return stream ? OK : INVALID_HANDLE;
}

int stream_synchronize(Stream * handle, int device) {
    pthread_mutex_lock(&fake_lock);
    Stream * stream = find(handle, device);
    int code = stream ? OK : INVALID_HANDLE;
    if (stream) {
        unsigned long until = stream->last ? stream->last->number : 0;
        while (stream->first && stream->first->number <= until) {
            pthread_cond_wait(&fake_changed, &fake_lock);
        }
        code = device_fault[stream->device];
    }
    pthread_mutex_unlock(&fake_lock);
    return code;
}

int stream_query(Stream * handle, int device) {
    pthread_mutex_lock(&fake_lock);
    Stream * stream = find(handle, device);
    int code = !stream ? INVALID_HANDLE : stream->first ? NOT_READY : device_fault[stream->device];
    pthread_mutex_unlock(&fake_lock);
    return code;
}

int streams_synchronize(int device) {
    pthread_mutex_lock(&fake_lock);
    unsigned long until = last_number;
    for (int open = 1; open;) {
        open = 0;
        for (Stream * stream = streams; stream; stream = stream->next) {
            if (stream->device == device && stream->first && stream->first->number <= until) {
                open = 1;
            }
        }
        if (open) {
            pthread_cond_wait(&fake_changed, &fake_lock);
        }
    }
    int code = device_fault[device];
    pthread_mutex_unlock(&fake_lock);
    return code;
}

int event_create(Event ** out, int timing) {
    if (!out) {
        return INVALID_VALUE;
    }
    pthread_mutex_lock(&fake_lock);
    Event * event = calloc(1, sizeof *event);
    event->references = 1;
    event->timing = timing;
    count_live_events++;
    *out = event;
    pthread_mutex_unlock(&fake_lock);
    return OK;
}

int event_destroy(Event * event) {
    if (!event) {
        return INVALID_HANDLE;
    }
    pthread_mutex_lock(&fake_lock);
    count_live_events--;
    event_unref(event);
    pthread_mutex_unlock(&fake_lock);
    return OK;
}

int event_record(Event * event, Stream * stream, int device) {
    if (!event) {
        return INVALID_HANDLE;
    }
    pthread_mutex_lock(&fake_lock);
    unsigned long generation = ++event->recorded;
    pthread_mutex_unlock(&fake_lock);
    return stream_push(stream, device, (Work){ .kind = RECORD, .event = event, .generation = generation });
}

int event_wait(Stream * stream, int device, Event * event) {
    if (!event) {
        return INVALID_HANDLE;
    }
    pthread_mutex_lock(&fake_lock);
    unsigned long generation = event->recorded;
    pthread_mutex_unlock(&fake_lock);
    return stream_push(stream, device, (Work){ .kind = WAIT, .event = event, .generation = generation });
}

int event_query(Event * event) {
    if (!event) {
        return INVALID_HANDLE;
    }
    pthread_mutex_lock(&fake_lock);
    int code = event->done >= event->recorded ? OK : NOT_READY;
    pthread_mutex_unlock(&fake_lock);
    return code;
}

int event_synchronize(Event * event) {
    if (!event) {
        return INVALID_HANDLE;
    }
    pthread_mutex_lock(&fake_lock);
    unsigned long generation = event->recorded;
    while (event->done < generation) {
        pthread_cond_wait(&fake_changed, &fake_lock);
    }
    pthread_mutex_unlock(&fake_lock);
    return OK;
}
