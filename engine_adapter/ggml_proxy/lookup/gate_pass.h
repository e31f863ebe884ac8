// Who may make a device wait for the host, and when not.
//
// While a gate waits for its answer, some calls of the driver wait for the device: those that allocate, free, and make or
// destroy streams. They hold a lock of the driver's that whoever answers needs, too. So they come when no gated graph
// runs, as far as they come by us: for others a gate gives up waiting.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace expertier {

class GatePass {
  public:
    class Gated { // held by a gated graph until all of its gates are answered
      public:
        explicit Gated(GatePass & pass) : pass_(pass) {
            std::lock_guard<std::mutex> guard(pass_.mutex_);
            may_run = pass_.n_still_ == 0 && std::chrono::steady_clock::now() >= pass_.still_until_;
            pass_.n_gated_ += may_run;
        }
        ~Gated() {
            std::lock_guard<std::mutex> guard(pass_.mutex_);
            pass_.n_gated_ -= may_run;
            if (pass_.n_still_ > 0) {
                pass_.changed_.notify_all();
            }
        }
        Gated(const Gated &) = delete;
        Gated & operator=(const Gated &) = delete;
        bool may_run;

      private:
        GatePass & pass_;
    };

    class Still { // held around calls that may wait for the device; not by a thread with a gated graph
      public:
        explicit Still(GatePass & pass) : pass_(pass) {
            std::unique_lock<std::mutex> guard(pass_.mutex_);
            pass_.n_still_ +=
                1; // new ones go the other way at once, else two contexts could keep this waiting for ever
            pass_.changed_.wait(guard, [this] { return pass_.n_gated_ == 0; });
        }
        ~Still() {
            std::lock_guard<std::mutex> guard(pass_.mutex_);
            pass_.n_still_ -= 1;
        }
        // More such calls follow soon, which do not come by us.
        void linger() {
            std::lock_guard<std::mutex> guard(pass_.mutex_);
            pass_.still_until_ = std::chrono::steady_clock::now() + after;
        }
        Still(const Still &) = delete;
        Still & operator=(const Still &) = delete;

      private:
        static constexpr std::chrono::milliseconds after{ 200 };
        GatePass & pass_;
    };

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int n_gated_ = 0, n_still_ = 0;
    std::chrono::steady_clock::time_point still_until_{};
};

} // namespace expertier
