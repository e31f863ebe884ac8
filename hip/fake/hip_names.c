// HIP's calls: what expertier uses, and what else a library such as CuPy needs to start and to copy.
#include "fake.h"

#include <stdio.h>

int fake_default_version = 71400000, fake_default_warp = 64;

static __thread int here, last_error;

static int keep(int code) {
    if (code) {
        last_error = code;
    }
    return code;
}

#define CALL                                                                                                           \
    int injected = fake_begin(__func__);                                                                               \
    if (injected)                                                                                                      \
        return keep(injected);                                                                                         \
    if (!fake_devices)                                                                                                 \
    return keep(NO_DEVICE)
#define DEVICE_CALL                                                                                                    \
    CALL;                                                                                                              \
    if (device_fault[here])                                                                                            \
    return keep(device_fault[here])

// What gives something back does so on a faulty device too, and returns the fault then.
#define RELEASING_CALL(code)                                                                                           \
    CALL;                                                                                                              \
    int released = code;                                                                                               \
    return keep(device_fault[here] ? device_fault[here] : released)

// clang-format off
#define NAMES(X)                                                                                                       \
    X(OK, "hipSuccess") X(INVALID_VALUE, "hipErrorInvalidValue") X(OUT_OF_MEMORY, "hipErrorOutOfMemory")               \
    X(NOT_INITIALIZED, "hipErrorNotInitialized") X(NO_DEVICE, "hipErrorNoDevice")                                      \
    X(INVALID_DEVICE, "hipErrorInvalidDevice") X(INVALID_IMAGE, "hipErrorInvalidImage")                                \
    X(INVALID_CONTEXT, "hipErrorInvalidContext") X(PEER_UNSUPPORTED, "hipErrorPeerAccessUnsupported")                  \
    X(INVALID_HANDLE, "hipErrorInvalidHandle") X(NOT_FOUND, "hipErrorNotFound") X(NOT_READY, "hipErrorNotReady")       \
    X(ILLEGAL_ADDRESS, "hipErrorIllegalAddress")           \
    X(ALREADY_REGISTERED, "hipErrorHostMemoryAlreadyRegistered")   \
    X(NOT_REGISTERED, "hipErrorHostMemoryNotRegistered") X(NOT_SUPPORTED, "hipErrorNotSupported")
// clang-format on

const char * hipGetErrorName(int code) {
    switch (code) {
#define NAME(code, text)                                                                                               \
    case code:                                                                                                         \
        return text;
        NAMES(NAME)
#undef NAME
    }
    return "hipErrorUnknown";
}
const char * hipGetErrorString(int code) { return hipGetErrorName(code); }
int hipGetLastError(void) {
    int code = last_error;
    last_error = OK;
    return code;
}
int hipPeekAtLastError(void) { return last_error; }

int hipInit(unsigned flags) {
    CALL;
    return keep(flags ? INVALID_VALUE : OK);
}
int hipGetDeviceCount(int * out) {
    *out = 0;
    CALL;
    *out = (int) fake_devices;
    return OK;
}
int hipRuntimeGetVersion(int * out) {
    CALL;
    *out = fake_version ? (int) fake_version : fake_default_version;
    return OK;
}
int hipDriverGetVersion(int * out) { return hipRuntimeGetVersion(out); }
int hipSetDevice(int device) {
    CALL;
    if (device < 0 || device >= fake_devices) {
        return keep(INVALID_DEVICE);
    }
    here = device;
    return OK;
}
int hipGetDevice(int * out) {
    CALL;
    *out = here;
    return OK;
}
int hipDeviceGet(int * out, int ordinal) {
    CALL;
    *out = ordinal;
    return OK;
}
int hipDeviceGetName(char * out, int bytes, int device) {
    CALL;
    snprintf(out, (size_t) bytes, "Fake HIP device %d", device);
    return OK;
}
int hipDeviceGetPCIBusId(char * out, int bytes, int device) {
    CALL;
    snprintf(out, (size_t) bytes, "0000:%02x:00.0", device + 3);
    return OK;
}
int hipDeviceGetAttribute(int * out, int attribute, int device) {
    CALL;
    if (device < 0 || device >= fake_devices) {
        return keep(INVALID_DEVICE);
    }
    *out = attribute == 89   ? (int) fake_vmm
           : attribute == 87 ? (int) (fake_warp_size ? fake_warp_size : fake_default_warp)
           : attribute == 63 ? 4
           : attribute == 3  ? 1
           : attribute == 23 ? 9
                             : 0;
    return OK;
}
int hipGetDevicePropertiesR0600(char * out, int device) {
    CALL;
    if (device < 0 || device >= fake_devices) {
        return keep(INVALID_DEVICE);
    }
    memset(out, 0, 1472);
    snprintf(out, 256, "Fake HIP device %d", device);
    strcpy(out + 1160, "gfx906:sramecc+:xnack-");
    return OK;
}
int hipDeviceCanAccessPeer(int * out, int device, int peer) {
    CALL;
    *out = core_can_access(device, peer);
    return OK;
}
int hipDeviceSynchronize(void) {
    DEVICE_CALL;
    return keep(streams_synchronize(here));
}
int hipDeviceGetStreamPriorityRange(int * least, int * greatest) {
    CALL;
    if (least) {
        *least = 1;
    }
    if (greatest) {
        *greatest = -1;
    }
    return OK;
}

int hipMemGetInfo(size_t * free_bytes, size_t * total) {
    DEVICE_CALL;
    return core_memory_info(free_bytes, total, here);
}
int hipMalloc(void ** out, size_t bytes) {
    DEVICE_CALL;
    if (!bytes) {
        *out = NULL;
        return OK;
    }
    return keep(core_alloc(out, bytes, here));
}
int hipFree(void * address) { RELEASING_CALL(core_free(address)); }
int hipHostMalloc(void ** out, size_t bytes, unsigned flags) {
    (void) flags;
    DEVICE_CALL;
    return keep(core_host_alloc(out, bytes));
}
int hipHostAlloc(void ** out, size_t bytes, unsigned flags) { return hipHostMalloc(out, bytes, flags); }
int hipHostFree(void * address) { RELEASING_CALL(core_host_free(address)); }
int hipHostRegister(void * address, size_t bytes, unsigned flags) {
    (void) flags;
    DEVICE_CALL;
    return keep(core_register(address, bytes));
}
int hipHostUnregister(void * address) { RELEASING_CALL(core_unregister(address)); }
int hipHostGetDevicePointer(void ** out, void * address, unsigned flags) {
    (void) flags;
    DEVICE_CALL;
    return keep(core_host_pointer(out, address));
}
typedef struct {
    int type, device;
    void *device_pointer, *host_pointer;
    int managed;
    unsigned flags;
} Attributes;
int hipPointerGetAttributes(Attributes * out, const void * address) {
    DEVICE_CALL;
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&fake_lock);
    Range * range = range_at((uintptr_t) address, DEVICE | MAPPED | PINNED | REGISTERED);
    if (range) {
        int is_device = range->kind == DEVICE || range->kind == MAPPED;
        void * found = (void *) (uintptr_t) address;
        *out = (Attributes){ is_device ? 2 : 1, range->device, found, is_device ? NULL : found, 0, 0 };
    }
    pthread_mutex_unlock(&fake_lock);
    return OK;
}

int hipMemcpyHtoDAsync(void * target, const void * source, size_t bytes, Stream * stream) {
    DEVICE_CALL;
    return keep(work_copy(target, source, bytes, 1, stream, here));
}
int hipMemcpyDtoHAsync(void * target, const void * source, size_t bytes, Stream * stream) {
    DEVICE_CALL;
    return keep(work_copy(target, source, bytes, 1, stream, here));
}
int hipMemcpyDtoDAsync(void * target, const void * source, size_t bytes, Stream * stream) {
    DEVICE_CALL;
    return keep(work_copy(target, source, bytes, 0, stream, here));
}
// kinds: 1 to the device, 2 to the host, 3 within, 4 by the addresses
int hipMemcpyAsync(void * target, const void * source, size_t bytes, int kind, Stream * stream) {
    DEVICE_CALL;
    return keep(work_copy(target, source, bytes, kind != 3, stream, here));
}
int hipMemcpy(void * target, const void * source, size_t bytes, int kind) {
    int code = hipMemcpyAsync(target, source, bytes, kind, NULL);
    return code ? code : keep(stream_synchronize(NULL, here));
}
int hipMemsetD8Async(void * target, unsigned char value, size_t bytes, Stream * stream) {
    DEVICE_CALL;
    return keep(work_fill(target, value, bytes, stream, here));
}
int hipMemsetAsync(void * target, int value, size_t bytes, Stream * stream) {
    DEVICE_CALL;
    return keep(work_fill(target, value, bytes, stream, here));
}
int hipMemset(void * target, int value, size_t bytes) {
    int code = hipMemsetAsync(target, value, bytes, NULL);
    return code ? code : keep(stream_synchronize(NULL, here));
}

int hipStreamCreateWithPriority(Stream ** out, unsigned flags, int priority) {
    DEVICE_CALL;
    return keep(stream_create(out, here, flags, priority));
}
int hipStreamCreateWithFlags(Stream ** out, unsigned flags) { return hipStreamCreateWithPriority(out, flags, 0); }
int hipStreamCreate(Stream ** out) { return hipStreamCreateWithPriority(out, 0, 0); }
int hipStreamDestroy(Stream * stream) { RELEASING_CALL(stream_destroy(stream)); }
int hipStreamSynchronize(Stream * stream) {
    DEVICE_CALL;
    return keep(stream_synchronize(stream, here));
}
int hipStreamQuery(Stream * stream) {
    DEVICE_CALL;
    return keep(stream_query(stream, here));
}
int hipStreamGetFlags(Stream * stream, unsigned * flags) {
    DEVICE_CALL;
    return keep(stream_flags(stream, here, flags, NULL));
}
int hipStreamGetPriority(Stream * stream, int * priority) {
    DEVICE_CALL;
    return keep(stream_flags(stream, here, NULL, priority));
}
int hipStreamIsCapturing(Stream * stream, int * out) {
    (void) stream;
    *out = 0;
    return OK;
}
int hipStreamWaitEvent(Stream * stream, Event * event, unsigned flags) {
    (void) flags;
    DEVICE_CALL;
    return keep(event_wait(stream, here, event));
}
int hipLaunchHostFunc(Stream * stream, void (*function)(void *), void * argument) {
    DEVICE_CALL;
    return keep(stream_push(stream, here, (Work){ .kind = CALLBACK, .callback = function, .target = argument }));
}
int hipEventCreateWithFlags(Event ** out, unsigned flags) {
    DEVICE_CALL;
    return keep(event_create(out, !(flags & 2)));
}
int hipEventCreate(Event ** out) { return hipEventCreateWithFlags(out, 0); }
int hipEventDestroy(Event * event) { RELEASING_CALL(event_destroy(event)); }
int hipEventRecord(Event * event, Stream * stream) {
    DEVICE_CALL;
    return keep(event_record(event, stream, here));
}
int hipEventQuery(Event * event) {
    DEVICE_CALL;
    return keep(event_query(event));
}
int hipEventSynchronize(Event * event) {
    DEVICE_CALL;
    int code = event_synchronize(event);
    return keep(code ? code : device_fault[here]);
}

// Nothing that runs on this driver captures work yet: a caller must do without.
int hipStreamBeginCapture(Stream * stream, int mode) {
    (void) stream;
    (void) mode;
    DEVICE_CALL;
    return keep(NOT_SUPPORTED);
}
int hipStreamEndCapture(Stream * stream, void ** out) {
    (void) stream;
    *out = NULL;
    DEVICE_CALL;
    return keep(NOT_SUPPORTED);
}
int hipGraphInstantiateWithFlags(void ** out, void * graph, unsigned long long flags) {
    (void) graph;
    (void) flags;
    *out = NULL;
    DEVICE_CALL;
    return keep(NOT_SUPPORTED);
}
int hipGraphLaunch(void * exec, Stream * stream) {
    (void) exec;
    (void) stream;
    DEVICE_CALL;
    return keep(NOT_SUPPORTED);
}
int hipGraphExecDestroy(void * exec) {
    (void) exec;
    DEVICE_CALL;
    return keep(NOT_SUPPORTED);
}
int hipGraphDestroy(void * graph) {
    (void) graph;
    DEVICE_CALL;
    return keep(NOT_SUPPORTED);
}

int hipModuleLoadData(void ** out, const void * image) {
    DEVICE_CALL;
    return keep(module_load(out, image));
}
int hipModuleUnload(void * module) { RELEASING_CALL(module_unload(module)); }
int hipModuleGetFunction(Function ** out, void * module, const char * name) {
    DEVICE_CALL;
    return keep(module_function(out, module, name));
}
int hipModuleLaunchKernel(Function * function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, Stream * stream, void ** arguments, void ** extra) {
    DEVICE_CALL;
    if (shared || extra) {
        return keep(NOT_SUPPORTED);
    }
    return keep(
        module_launch(function, (unsigned[]){ gx, gy, gz }, (unsigned[]){ bx, by, bz }, arguments, stream, here));
}

int hipMemGetAllocationGranularity(size_t * out, const Properties * properties, int option) {
    (void) option;
    CALL;
    return keep(core_granularity(out, properties));
}
int hipMemAddressReserve(void ** out, size_t bytes, size_t alignment, void * wish, unsigned long long flags) {
    (void) alignment;
    (void) wish;
    DEVICE_CALL;
    return keep(flags ? INVALID_VALUE : core_reserve(out, bytes));
}
int hipMemAddressFree(void * address, size_t bytes) { RELEASING_CALL(core_unreserve(address, bytes)); }
int hipMemCreate(Handle ** out, size_t bytes, const Properties * properties, unsigned long long flags) {
    DEVICE_CALL;
    return keep(flags ? INVALID_VALUE : core_create(out, bytes, properties));
}
int hipMemRelease(Handle * handle) { RELEASING_CALL(core_release(handle)); }
int hipMemMap(void * address, size_t bytes, size_t offset, Handle * handle, unsigned long long flags) {
    DEVICE_CALL;
    return keep(flags ? INVALID_VALUE : core_map(address, bytes, offset, handle));
}
int hipMemUnmap(void * address, size_t bytes) { RELEASING_CALL(core_unmap(address, bytes, here)); }
int hipMemSetAccess(void * address, size_t bytes, const Access * access, size_t n) {
    DEVICE_CALL;
    return keep(core_set_access(address, bytes, access, n));
}
