// CUDA's driver calls, as expertier uses them.
#include "fake.h"

#include <stdio.h>

int fake_default_version = 13000, fake_default_warp = 32;

typedef struct {
    int device;
} Context;
static Context contexts[DEVICES] = { { 0 }, { 1 }, { 2 }, { 3 }, { 4 }, { 5 }, { 6 }, { 7 } };
static __thread Context * current;

static int has_ended(void) { return fake_contexts_end && !__atomic_load_n(&count_live_contexts, __ATOMIC_SEQ_CST); }

#define CALL                                                                                                           \
    int injected = fake_begin(__func__);                                                                               \
    if (injected)                                                                                                      \
    return injected
// Calls that need a context; those on a device that is faulty return the fault.
#define CONTEXT_CALL                                                                                                   \
    CALL;                                                                                                              \
    if (!current)                                                                                                      \
        return INVALID_CONTEXT;                                                                                        \
    if (has_ended())                                                                                                   \
        return CONTEXT_IS_DESTROYED;                                                                                   \
    if (device_fault[current->device])                                                                                 \
    return device_fault[current->device]
// What gives something back does so on a faulty device too, and returns the fault then.
#define RELEASING_CALL(code)                                                                                           \
    CALL;                                                                                                              \
    if (!current)                                                                                                      \
        return INVALID_CONTEXT;                                                                                        \
    if (has_ended())                                                                                                   \
        return CONTEXT_IS_DESTROYED;                                                                                   \
    int released = code;                                                                                               \
    return device_fault[current->device] ? device_fault[current->device] : released
#define DEVICE_CALL(ordinal)                                                                                           \
    CALL;                                                                                                              \
    if ((ordinal) < 0 || (ordinal) >= fake_devices)                                                                    \
    return INVALID_DEVICE
#define HERE current->device

int cuGetErrorName(int code, const char ** name) {
    switch (code) {
#define NAME(code, text)                                                                                               \
    case code:                                                                                                         \
        *name = "CUDA_" text;                                                                                          \
        return OK
        NAME(OK, "SUCCESS");
        NAME(INVALID_VALUE, "ERROR_INVALID_VALUE");
        NAME(OUT_OF_MEMORY, "ERROR_OUT_OF_MEMORY");
        NAME(NOT_INITIALIZED, "ERROR_NOT_INITIALIZED");
        NAME(NO_DEVICE, "ERROR_NO_DEVICE");
        NAME(INVALID_DEVICE, "ERROR_INVALID_DEVICE");
        NAME(INVALID_IMAGE, "ERROR_INVALID_IMAGE");
        NAME(INVALID_CONTEXT, "ERROR_INVALID_CONTEXT");
        NAME(PEER_UNSUPPORTED, "ERROR_PEER_ACCESS_UNSUPPORTED");
        NAME(INVALID_HANDLE, "ERROR_INVALID_HANDLE");
        NAME(NOT_FOUND, "ERROR_NOT_FOUND");
        NAME(NOT_READY, "ERROR_NOT_READY");
        NAME(ILLEGAL_ADDRESS, "ERROR_ILLEGAL_ADDRESS");
        NAME(CONTEXT_IS_DESTROYED, "ERROR_CONTEXT_IS_DESTROYED");
        NAME(ALREADY_REGISTERED, "ERROR_HOST_MEMORY_ALREADY_REGISTERED");
        NAME(NOT_REGISTERED, "ERROR_HOST_MEMORY_NOT_REGISTERED");
        NAME(NOT_SUPPORTED, "ERROR_NOT_SUPPORTED");
#undef NAME
    }
    *name = NULL;
    return INVALID_VALUE;
}

int cuInit(unsigned flags) {
    CALL;
    return flags ? INVALID_VALUE : fake_devices ? OK : NO_DEVICE;
}
int cuDeviceGetCount(int * out) {
    CALL;
    *out = (int) fake_devices;
    return OK;
}
int cuDriverGetVersion(int * out) {
    CALL;
    *out = fake_version ? (int) fake_version : fake_default_version;
    return OK;
}
int cuDeviceGetName(char * out, int bytes, int device) {
    DEVICE_CALL(device);
    snprintf(out, (size_t) bytes, "Fake CUDA device %d", device);
    return OK;
}
int cuDeviceGetAttribute(int * out, int attribute, int device) {
    DEVICE_CALL(device);
    *out = attribute == 102  ? (int) fake_vmm
           : attribute == 10 ? (int) (fake_warp_size ? fake_warp_size : fake_default_warp)
           : attribute == 16 ? 4
           : attribute == 75 ? 9
                             : 0;
    return OK;
}
int cuDeviceCanAccessPeer(int * out, int device, int peer) {
    DEVICE_CALL(device);
    if (peer < 0 || peer >= fake_devices) {
        return INVALID_DEVICE;
    }
    *out = core_can_access(device, peer);
    return OK;
}
int cuDevicePrimaryCtxRetain(Context ** out, int device) {
    DEVICE_CALL(device);
    *out = &contexts[device];
    __atomic_add_fetch(&count_live_contexts, 1, __ATOMIC_SEQ_CST);
    return OK;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    DEVICE_CALL(device);
    if (!__atomic_sub_fetch(&count_live_contexts, 1, __ATOMIC_SEQ_CST) && fake_contexts_end) {
        for (Range * range; (range = range_of_kind(DEVICE));) {
            core_free((void *) range->begin);
        }
        for (Range * range; (range = range_of_kind(PINNED));) {
            core_host_free((void *) range->begin);
        }
    }
    return OK;
}
int cuCtxSetCurrent(Context * context) {
    CALL;
    current = context;
    return OK;
}
int cuCtxGetCurrent(Context ** out) {
    CALL;
    *out = current;
    return OK;
}
int cuCtxSynchronize(void) {
    CONTEXT_CALL;
    return streams_synchronize(HERE);
}
int cuCtxGetStreamPriorityRange(int * least, int * greatest) {
    CONTEXT_CALL;
    *least = 0;
    *greatest = -5;
    return OK;
}

int cuMemGetInfo_v2(size_t * free_bytes, size_t * total) {
    CONTEXT_CALL;
    return core_memory_info(free_bytes, total, HERE);
}
int cuMemAlloc_v2(void ** out, size_t bytes) {
    CONTEXT_CALL;
    return core_alloc(out, bytes, HERE);
}
int cuMemFree_v2(void * address) { RELEASING_CALL(core_free(address)); }
int cuMemHostAlloc(void ** out, size_t bytes, unsigned flags) {
    (void) flags;
    CONTEXT_CALL;
    return core_host_alloc(out, bytes);
}
int cuMemFreeHost(void * address) { RELEASING_CALL(core_host_free(address)); }
int cuMemHostRegister_v2(void * address, size_t bytes, unsigned flags) {
    (void) flags;
    CONTEXT_CALL;
    return core_register(address, bytes);
}
int cuMemHostUnregister(void * address) { RELEASING_CALL(core_unregister(address)); }
int cuMemHostGetDevicePointer_v2(void ** out, void * address, unsigned flags) {
    (void) flags;
    CONTEXT_CALL;
    return core_host_pointer(out, address);
}

int cuMemcpyHtoDAsync_v2(void * target, const void * source, size_t bytes, Stream * stream) {
    CONTEXT_CALL;
    return work_copy(target, source, bytes, 1, stream, HERE);
}
int cuMemcpyDtoHAsync_v2(void * target, const void * source, size_t bytes, Stream * stream) {
    CONTEXT_CALL;
    return work_copy(target, source, bytes, 1, stream, HERE);
}
int cuMemcpyDtoDAsync_v2(void * target, const void * source, size_t bytes, Stream * stream) {
    CONTEXT_CALL;
    return work_copy(target, source, bytes, 0, stream, HERE);
}
int cuMemsetD8Async(void * target, unsigned char value, size_t bytes, Stream * stream) {
    CONTEXT_CALL;
    return work_fill(target, value, bytes, stream, HERE);
}

int cuStreamCreateWithPriority(Stream ** out, unsigned flags, int priority) {
    CONTEXT_CALL;
    return stream_create(out, HERE, flags, priority);
}
int cuStreamDestroy_v2(Stream * stream) { RELEASING_CALL(stream_destroy(stream)); }
int cuStreamSynchronize(Stream * stream) {
    CONTEXT_CALL;
    return stream_synchronize(stream, HERE);
}
int cuStreamQuery(Stream * stream) {
    CONTEXT_CALL;
    return stream_query(stream, HERE);
}
int cuStreamWaitEvent(Stream * stream, Event * event, unsigned flags) {
    (void) flags;
    CONTEXT_CALL;
    return event_wait(stream, HERE, event);
}
int cuEventCreate(Event ** out, unsigned flags) {
    CONTEXT_CALL;
    return event_create(out, !(flags & 2));
}
int cuEventDestroy_v2(Event * event) { RELEASING_CALL(event_destroy(event)); }
int cuEventRecord(Event * event, Stream * stream) {
    CONTEXT_CALL;
    return event_record(event, stream, HERE);
}
int cuEventQuery(Event * event) {
    CONTEXT_CALL;
    return event_query(event);
}
int cuEventSynchronize(Event * event) {
    CONTEXT_CALL;
    int code = event_synchronize(event);
    return code ? code : device_fault[HERE];
}

// Nothing that runs on this driver captures work yet: a caller must do without.
int cuStreamBeginCapture_v2(Stream * stream, int mode) {
    (void) stream;
    (void) mode;
    CONTEXT_CALL;
    return NOT_SUPPORTED;
}
int cuStreamEndCapture(Stream * stream, void ** out) {
    (void) stream;
    *out = NULL;
    CONTEXT_CALL;
    return NOT_SUPPORTED;
}
int cuGraphInstantiateWithFlags(void ** out, void * graph, unsigned long long flags) {
    (void) graph;
    (void) flags;
    *out = NULL;
    CONTEXT_CALL;
    return NOT_SUPPORTED;
}
int cuGraphLaunch(void * exec, Stream * stream) {
    (void) exec;
    (void) stream;
    CONTEXT_CALL;
    return NOT_SUPPORTED;
}
int cuGraphExecDestroy(void * exec) {
    (void) exec;
    CONTEXT_CALL;
    return NOT_SUPPORTED;
}
int cuGraphDestroy(void * graph) {
    (void) graph;
    CONTEXT_CALL;
    return NOT_SUPPORTED;
}
int cuGraphExecUpdate_v2(void * exec, void * graph, void * found) {
    (void) exec;
    (void) graph;
    (void) found;
    CONTEXT_CALL;
    return NOT_SUPPORTED;
}

int cuModuleLoadData(void ** out, const void * image) {
    CONTEXT_CALL;
    return module_load(out, image);
}
int cuModuleUnload(void * module) { RELEASING_CALL(module_unload(module)); }
int cuModuleGetFunction(Function ** out, void * module, const char * name) {
    CONTEXT_CALL;
    return module_function(out, module, name);
}
int cuLaunchKernel(Function * function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, Stream * stream, void ** arguments, void ** extra) {
    CONTEXT_CALL;
    if (shared || extra) {
        return NOT_SUPPORTED;
    }
    return module_launch(function, (unsigned[]){ gx, gy, gz }, (unsigned[]){ bx, by, bz }, arguments, stream, HERE);
}

int cuMemGetAllocationGranularity(size_t * out, const Properties * properties, int option) {
    (void) option;
    CALL;
    return core_granularity(out, properties);
}
int cuMemAddressReserve(void ** out, size_t bytes, size_t alignment, void * wish, unsigned long long flags) {
    (void) alignment;
    (void) wish;
    CONTEXT_CALL;
    return flags ? INVALID_VALUE : core_reserve(out, bytes);
}
int cuMemAddressFree(void * address, size_t bytes) { RELEASING_CALL(core_unreserve(address, bytes)); }
int cuMemCreate(Handle ** out, size_t bytes, const Properties * properties, unsigned long long flags) {
    CONTEXT_CALL;
    return flags ? INVALID_VALUE : core_create(out, bytes, properties);
}
int cuMemRelease(Handle * handle) { RELEASING_CALL(core_release(handle)); }
int cuMemMap(void * address, size_t bytes, size_t offset, Handle * handle, unsigned long long flags) {
    CONTEXT_CALL;
    return flags ? INVALID_VALUE : core_map(address, bytes, offset, handle);
}
int cuMemUnmap(void * address, size_t bytes) { RELEASING_CALL(core_unmap(address, bytes, HERE)); }
int cuMemSetAccess(void * address, size_t bytes, const Access * access, size_t n) {
    CONTEXT_CALL;
    return core_set_access(address, bytes, access, n);
}
