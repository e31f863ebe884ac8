// A lock between graphs and moves of the slots: graphs run side by side, and a move runs while no graph does.
#pragma once

#include <condition_variable>
#include <mutex>

namespace expertier {

class RunLock {
  public:
    class Run { // a graph holds it from when it first reads where slots lie until it has queued its last node
      public:
        explicit Run(RunLock & lock) : lock_(lock) {
            std::unique_lock<std::mutex> guard(lock_.mutex_);
            // A waiting move goes first: contexts whose graphs take turns could keep it waiting for ever.
            lock_.changed_.wait(guard, [this] { return lock_.n_movers_ == 0; });
            lock_.n_running_ += 1;
        }
        ~Run() {
            std::lock_guard<std::mutex> guard(lock_.mutex_);
            lock_.n_running_ -= 1;
            if (lock_.n_movers_ > 0) {
                lock_.changed_.notify_all();
            }
        }
        Run(const Run &) = delete;
        Run & operator=(const Run &) = delete;

      private:
        RunLock & lock_;
    };

    class Alone { // a move holds it; a thread that holds a Run must not ask for it
      public:
        explicit Alone(RunLock & lock) : lock_(lock) {
            std::unique_lock<std::mutex> guard(lock_.mutex_);
            lock_.n_movers_ += 1;
            lock_.changed_.wait(guard, [this] { return lock_.n_running_ == 0 && !lock_.is_moving_; });
            lock_.is_moving_ = true;
        }
        ~Alone() {
            std::lock_guard<std::mutex> guard(lock_.mutex_);
            lock_.n_movers_ -= 1;
            lock_.is_moving_ = false;
            lock_.changed_.notify_all();
        }
        Alone(const Alone &) = delete;
        Alone & operator=(const Alone &) = delete;

      private:
        RunLock & lock_;
    };

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int n_running_ = 0;
    int n_movers_ = 0; // the move that runs and the moves that wait
    bool is_moving_ = false;
};

} // namespace expertier
