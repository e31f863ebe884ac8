// Bugs that the sanitizers must report (run.py): were they silent about these, they would be about all others.
#include <climits>
#include <memory>
#include <thread>

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int race() {
    int counted = 0;
    std::thread other([&] { counted++; });
    counted++;
    other.join();
    return counted;
}

EXPORT int heap_overflow(int index) {
    const std::unique_ptr<int[]> four(new int[4]());
    return four[static_cast<size_t>(index)];
}

EXPORT int integer_overflow(int more) { return INT_MAX + more; }
