// Modules: machine code of this machine, as the fake runtime compiler (rtc.cpp) makes it.
#include "fake.h"

#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

// The size of an ELF image, which ends with its section headers.
static size_t image_bytes(const unsigned char * image) {
    uint64_t sections;
    uint16_t entry, count;
    memcpy(&sections, image + 40, sizeof sections);
    memcpy(&entry, image + 58, sizeof entry);
    memcpy(&count, image + 60, sizeof count);
    return sections + (size_t) entry * count;
}

int module_load(void ** out, const void * image) {
    if (!out || !image) {
        return INVALID_VALUE;
    }
    if (memcmp(image,
               "\x7f"
               "ELF",
               4)) {
        return INVALID_IMAGE;
    }
    // A name of its own for each: the loader takes two files of one name for the same.
    const char * temporary = getenv("TMPDIR");
    char path[4096];
    snprintf(path, sizeof path, "%s/expertier-fake-module-XXXXXX", temporary && *temporary ? temporary : "/tmp");
    int fd = mkstemp(path);
    if (fd < 0) {
        return OUT_OF_MEMORY;
    }
    size_t left = image_bytes(image);
    for (const char * at = image; left;) {
        ssize_t written = write(fd, at, left);
        if (written <= 0) {
            break;
        }
        at += written;
        left -= (size_t) written;
    }
    void * module = left ? NULL : dlopen(path, RTLD_NOW | RTLD_LOCAL);
    close(fd);
    unlink(path);
    if (!module) {
        return INVALID_IMAGE;
    }
    pthread_mutex_lock(&fake_lock);
    count_live_modules++;
    pthread_mutex_unlock(&fake_lock);
    *out = module;
    return OK;
}

// The code stays loaded: the C++ runtime of a kernel's thread-local data may outlive it.
int module_unload(void * module) {
    if (!module) {
        return INVALID_HANDLE;
    }
    pthread_mutex_lock(&fake_lock);
    count_live_modules--;
    pthread_mutex_unlock(&fake_lock);
    return OK;
}

int module_function(Function ** out, void * module, const char * name) {
    char symbol[256];
    snprintf(symbol, sizeof symbol, "expertier_fake_kernel_%s", name);
    Function * function = dlsym(module, symbol);
    if (!function) {
        return NOT_FOUND;
    }
    *out = function;
    return OK;
}

int module_launch(Function * function, const unsigned * grid, const unsigned * block, void ** arguments,
                  Stream * stream, int device) {
    if (!function) {
        return INVALID_HANDLE;
    }
    unsigned threads = block[0] * block[1] * block[2];
    if (!grid[0] || !grid[1] || !grid[2] || !threads || threads > 1024 || grid[1] > 65535 || grid[2] > 65535) {
        return INVALID_VALUE;
    }
    Work work = { .kind = LAUNCH, .function = function, .arguments = function->pack(arguments) };
    memcpy(work.grid, grid, sizeof work.grid);
    memcpy(work.block, block, sizeof work.block);
    pthread_mutex_lock(&fake_lock);
    count_launches++;
    pthread_mutex_unlock(&fake_lock);
    return stream_push(stream, device, work);
}
