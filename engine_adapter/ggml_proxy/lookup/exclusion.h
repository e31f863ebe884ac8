// Keeps calls that wait for the device apart from graphs in which the device waits for the host.
//
// Driver calls that allocate, free, and make or destroy streams wait until the device is idle, and hold a lock of the
// driver's meanwhile. The host needs the same lock to answer a device look-up, so with a look-up waiting neither would
// ever end. Such calls of the proxy therefore wait until no graph with device look-ups runs. Calls that do not pass
// through the proxy are not kept apart: a look-up gives up waiting after its spin limit.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace expertier {

class LookupExclusion {
  public:
    class Running { // held by a graph until all of its look-ups are answered
      public:
        explicit Running(LookupExclusion & exclusion) : exclusion_(exclusion) {
            std::lock_guard<std::mutex> guard(exclusion_.mutex_);
            may_run = exclusion_.n_waits_ == 0 && std::chrono::steady_clock::now() >= exclusion_.waits_until_;
            exclusion_.n_running_ += may_run;
        }
        ~Running() {
            std::lock_guard<std::mutex> guard(exclusion_.mutex_);
            exclusion_.n_running_ -= may_run;
            if (exclusion_.n_waits_ > 0) {
                exclusion_.changed_.notify_all();
            }
        }
        Running(const Running &) = delete;
        Running & operator=(const Running &) = delete;
        bool may_run;

      private:
        LookupExclusion & exclusion_;
    };

    class DeviceWait { // held around calls that may wait for the device, by a thread that runs no such graph
      public:
        explicit DeviceWait(LookupExclusion & exclusion) : exclusion_(exclusion) {
            std::unique_lock<std::mutex> guard(exclusion_.mutex_);
            exclusion_.n_waits_ +=
                1; // graphs that begin now do without look-ups: two contexts in turn could keep this call waiting for ever
            exclusion_.changed_.wait(guard, [this] { return exclusion_.n_running_ == 0; });
        }
        ~DeviceWait() {
            std::lock_guard<std::mutex> guard(exclusion_.mutex_);
            exclusion_.n_waits_ -= 1;
        }
        // Has graphs do without look-ups for a while: more such calls follow soon that do not pass through the proxy.
        void linger() {
            std::lock_guard<std::mutex> guard(exclusion_.mutex_);
            exclusion_.waits_until_ = std::chrono::steady_clock::now() + after;
        }
        DeviceWait(const DeviceWait &) = delete;
        DeviceWait & operator=(const DeviceWait &) = delete;

      private:
        static constexpr std::chrono::milliseconds after{ 200 };
        LookupExclusion & exclusion_;
    };

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int n_running_ = 0, n_waits_ = 0;
    std::chrono::steady_clock::time_point waits_until_;
};

} // namespace expertier
