// Who may make a device wait for the host, and when not.
//
// While a look-up waits for its answer, some calls of the driver wait for the device: those that allocate, free, and make or
// destroy streams. They hold a lock of the driver's that whoever answers needs, too. So they come when no graph with device look-ups
// runs, as far as they come by us: for others a look-up gives up waiting.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace expertier {

class LookupExclusion {
  public:
    class Running { // held by a graph with device look-ups until all of its look-ups are answered
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

    class
        DeviceWait { // held around calls that may wait for the device; not by a thread with a graph with device look-ups
      public:
        explicit DeviceWait(LookupExclusion & exclusion) : exclusion_(exclusion) {
            std::unique_lock<std::mutex> guard(exclusion_.mutex_);
            exclusion_.n_waits_ +=
                1; // new ones go the other way at once, else two contexts could keep this waiting for ever
            exclusion_.changed_.wait(guard, [this] { return exclusion_.n_running_ == 0; });
        }
        ~DeviceWait() {
            std::lock_guard<std::mutex> guard(exclusion_.mutex_);
            exclusion_.n_waits_ -= 1;
        }
        // More such calls follow soon, which do not come by us.
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
    std::chrono::steady_clock::time_point waits_until_{};
};

} // namespace expertier
