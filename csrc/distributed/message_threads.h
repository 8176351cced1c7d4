#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>

#include "fork.h"

namespace reef {

/// The process's threads for messages that nobody waits for: as many as have something to do, and those that
/// had a moment ago, as one that wakes begins sooner than one that is made.
class MessageThreads final : private AtFork {
 public:
  static MessageThreads& all();

  /// At once, beside all others. `work` throws nothing.
  void start(std::function<void()> work);

 private:
  MessageThreads() : AtFork(Order::kWorkers) {}
  void serve();
  void before_fork() override { mutex_.lock(); }
  void after_fork_in_parent() override { mutex_.unlock(); }
  void after_fork_in_child() override {
    idle_ = 0;
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::condition_variable given_;
  std::deque<std::function<void()>> works_;
  std::size_t idle_ = 0;
};

}  // namespace reef
