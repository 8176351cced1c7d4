#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "fork.h"
#include "tier/block_memory.h"

namespace reef {

/// Threads that each own one block of memory, for transfers that need one.
class BlockWorkers final : public AtFork {
 public:
  BlockWorkers(int threads, std::uint64_t block_bytes);
  ~BlockWorkers();
  BlockWorkers(const BlockWorkers&) = delete;
  BlockWorkers& operator=(const BlockWorkers&) = delete;

  /// Runs work(i, block) for i in [0, count), any order, and returns when all have run. The first exception
  /// stops what has not begun and is rethrown here. Several threads may call at once.
  using Work = std::function<void(std::uint64_t index, void* block)>;
  void for_each(std::uint64_t count, const Work& work);

  /// Returns when no work is under way.
  void before_fork() override;
  void after_fork_in_parent() override;
  /// Work is done by the calling thread from now on.
  void after_fork_in_child() override;

 private:
  struct Job {
    const Work& work;
    std::uint64_t count;
    std::uint64_t next = 0;
    std::uint64_t running = 0;
    std::exception_ptr error;
    std::condition_variable done;
  };
  /// Replaced as a whole in a forked child.
  struct State {
    std::mutex mutex;
    std::condition_variable wake;
    std::condition_variable rested;
    std::deque<Job*> jobs;  ///< with something left to begin
    std::size_t under_way = 0;
    bool stopping = false;
    std::vector<std::thread> threads;
  };
  static void serve(State& state, void* block);

  BlockMemory blocks_;
  std::unique_ptr<State> state_;
};

}  // namespace reef
