#pragma once

#include <cstdint>
#include <mutex>

namespace reef {

/// What a fork must find at rest. A child has the parent's memory and one thread: a lock that another thread
/// held is held for ever there, threads are missing, and what the kernel shares (a ring, a file) is still the
/// parent's. Everything in Reef that has a lock, a thread or a ring is one of these; fork.cpp calls them.
class AtFork {
 public:
  AtFork(const AtFork&) = delete;
  AtFork& operator=(const AtFork&) = delete;

  /// In the order in which locks are taken: an earlier one may wait for a later one.
  enum class Order : std::uint8_t { kPager, kLane, kTier, kWorkers, kBlocks, kTables, kCallbacks };

  /// Returns when nothing is under way, with the locks held.
  virtual void before_fork() = 0;
  virtual void after_fork_in_parent() = 0;
  /// Makes it usable by one thread, and leaves alone what is the parent's.
  virtual void after_fork_in_child() = 0;

 protected:
  explicit AtFork(Order order);
  ~AtFork();
};

/// A mutex, and nothing else.
class MutexAtFork final : public std::mutex, private AtFork {
 public:
  using AtFork::Order;
  explicit MutexAtFork(Order order) : AtFork(order) {}

 private:
  void before_fork() override { lock(); }
  void after_fork_in_parent() override { unlock(); }
  void after_fork_in_child() override { unlock(); }
};

}  // namespace reef
