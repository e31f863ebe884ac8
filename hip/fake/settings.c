// Switches, counters, and calls that fail on purpose.
#include "fake.h"

#include <ctype.h>
#include <stdio.h>

#define DEFINE(name, value) long long fake_##name = value;
SETTINGS(DEFINE)
#undef DEFINE
#define DEFINE(name) long long count_##name;
COUNTERS(DEFINE)
#undef DEFINE

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t fake_changed = PTHREAD_COND_INITIALIZER;
pthread_rwlock_t fake_touch = PTHREAD_RWLOCK_INITIALIZER;

typedef struct {
    const char * name;
    long long * value;
    long long initial;
} Named;
static Named settings[] = {
#define ROW(name, value) { #name, &fake_##name, value },
    SETTINGS(ROW)
#undef ROW
};
static const Named counters[] = {
#define ROW(name) { #name, &count_##name, 0 },
    COUNTERS(ROW)
#undef ROW
};
#define LENGTH(array) (sizeof(array) / sizeof(array)[0])

static char failing_call[64];
static long long calls_left;
static int failing_code;

static long long * named(const char * name) {
    for (size_t i = 0; i < LENGTH(settings); i++) {
        if (!strcmp(settings[i].name, name)) {
            return settings[i].value;
        }
    }
    for (size_t i = 0; i < LENGTH(counters); i++) {
        if (!strcmp(counters[i].name, name)) {
            return counters[i].value;
        }
    }
    return NULL;
}

static void from_environment(void) {
    for (size_t i = 0; i < LENGTH(settings); i++) {
        char variable[80] = "EXPERTIER_FAKE_";
        size_t n = strlen(variable);
        for (const char * c = settings[i].name; *c; c++) {
            variable[n++] = (char) toupper((unsigned char) *c);
        }
        const char * text = getenv(variable);
        *settings[i].value = text ? strtoll(text, NULL, 0) : settings[i].initial;
    }
    const char * text = getenv("EXPERTIER_FAKE_FAIL"); // CALL:NTH:CODE
    failing_call[0] = 0;
    if (text && sscanf(text, "%63[^:]:%lld:%d", failing_call, &calls_left, &failing_code) != 3) {
        fprintf(stderr, "EXPERTIER_FAKE_FAIL=%s is not of the form CALL:NTH:CODE\n", text);
        abort();
    }
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
void fake_read_settings(void) { pthread_once(&once, from_environment); }

int fake_begin(const char * call) {
    fake_read_settings();
    pthread_mutex_lock(&fake_lock);
    int code = OK;
    if (failing_call[0] && !strcmp(call, failing_call) && --calls_left == 0) {
        code = failing_code;
        failing_call[0] = 0;
        count_faults++;
    }
    pthread_mutex_unlock(&fake_lock);
    return code;
}

// What tests call. Returns 0, or -1 for a name that does not exist.
int expertier_fake_set(const char * name, long long value) {
    fake_read_settings();
    long long * place = named(name);
    if (!place) {
        return -1;
    }
    pthread_mutex_lock(&fake_lock);
    *place = value;
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
    return 0;
}

int expertier_fake_get(const char * name, long long * value) {
    fake_read_settings();
    long long * place = named(name);
    if (!place) {
        return -1;
    }
    pthread_mutex_lock(&fake_lock);
    *value = *place;
    pthread_mutex_unlock(&fake_lock);
    return 0;
}

// Have the nth call from now return a code; nth 0 disarms.
void expertier_fake_fail(const char * call, long long nth, int code) {
    fake_read_settings();
    pthread_mutex_lock(&fake_lock);
    snprintf(failing_call, sizeof failing_call, "%s", nth > 0 ? call : "");
    calls_left = nth;
    failing_code = code;
    pthread_mutex_unlock(&fake_lock);
}

// Switches as the environment has them, no fault, and devices that work again. Live objects stay.
void expertier_fake_reset(void) {
    fake_read_settings();
    pthread_mutex_lock(&fake_lock);
    from_environment();
    memset(device_fault, 0, DEVICES * sizeof device_fault[0]);
    count_pageable_copies = count_copies_in = count_copies_out = count_copies_within = count_launches = 0;
    count_bytes_in = count_faults = 0;
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
}
