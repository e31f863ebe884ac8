// What ThreadSanitizer is told of the kernels' volatile accesses (`make sanitize`; the flag is in library.py).
//
// A word that the device and the host both use while a kernel runs is volatile in the kernel and atomic on the host. On a
// device such an access is one of its own, seen by the host in the order of the fences; on this machine it is a plain one,
// which would be a race. So each is taken for what it is on the device: an atomic access, that acquires or releases.
#ifdef __SANITIZE_THREAD__

extern "C" {

void __tsan_acquire(void * address);
void __tsan_release(void * address);

#define VOLATILE_ACCESS(size)                                                                                          \
    __attribute__((no_sanitize("thread"))) void __tsan_volatile_read##size(void * address) {                           \
        __tsan_acquire(address);                                                                                       \
    }                                                                                                                  \
    __attribute__((no_sanitize("thread"))) void __tsan_volatile_write##size(void * address) { __tsan_release(address); }

VOLATILE_ACCESS(1)
VOLATILE_ACCESS(2)
VOLATILE_ACCESS(4)
VOLATILE_ACCESS(8)
}

#endif
