// Uses engine_adapter/ggml_proxy/backend/deferred.h from two threads, as a running graph and a move of the slots do.

#include "backend/deferred.h"

#include <atomic>
#include <memory>
#include <thread>

#define EXPORT extern "C" __attribute__((visibility("default")))

// Adds `n` objects on one thread, which also empties the list after every `run` of them, while another thread empties
// it all the time. Returns how many objects were dropped; `n` where each was dropped once.
EXPORT long deferred_drop(long n, int run) {
    std::atomic<long> dropped{ 0 };
    std::atomic<bool> is_adding{ true };
    const auto count = [&dropped](const int * object) {
        dropped += 1;
        delete object;
    };
    using Held = std::unique_ptr<int, decltype(count)>;
    {
        expertier::Deferred<Held> deferred;
        std::thread mover([&] {
            while (is_adding) {
                deferred.take();
            }
        });
        for (long i = 0; i < n; i++) {
            deferred.add(Held(new int(0), count));
            if (i % run == 0) {
                deferred.take();
            }
        }
        is_adding = false;
        mover.join();
    }
    return dropped;
}
