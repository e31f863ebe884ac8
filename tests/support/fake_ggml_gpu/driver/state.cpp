#include "driver/state.h"

#include <cstdio>
#include <mutex>

namespace fake_gpu {

Switches switches;
Counters counters[max_devices];

namespace {

std::mutex faults_mutex;
std::recursive_mutex driver;
std::string faults;
std::atomic<int64_t> calls_left[(int) Call::count]; // 0: none fails

} // namespace

std::unique_lock<std::recursive_mutex> driver_call() {
    std::unique_lock<std::recursive_mutex> call(driver, std::defer_lock);
    if (switches.one_at_a_time) {
        call.lock();
    }
    return call;
}

void fault(int device, const std::string & what) {
    const std::string line = "FAKE" + std::to_string(device) + ": " + what + "\n";
    fputs(line.c_str(), stderr);
    std::lock_guard<std::mutex> guard(faults_mutex);
    faults += line;
    counters[device].faults += 1;
}

std::string take_faults() {
    std::lock_guard<std::mutex> guard(faults_mutex);
    std::string taken;
    taken.swap(faults);
    return taken;
}

void fail_call(Call call, int64_t nth) { calls_left[(int) call] = nth; }

bool is_armed(Call call) { return calls_left[(int) call] > 0; }

bool must_fail(Call call) {
    std::atomic<int64_t> & left = calls_left[(int) call];
    int64_t now = left;
    while (now > 0 && !left.compare_exchange_weak(now, now - 1)) {
    }
    return now == 1;
}

} // namespace fake_gpu
