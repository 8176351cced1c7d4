#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tier/block_memory.h"

namespace reef {

/// Threads that each own one block of memory, for transfers that need one.
class BlockWorkers {
 public:
  BlockWorkers(int threads, std::uint64_t block_bytes);
  ~BlockWorkers();
  BlockWorkers(const BlockWorkers&) = delete;
  BlockWorkers& operator=(const BlockWorkers&) = delete;

  /// Runs work(i, block) for i in [0, count), any order, and returns when all have run. The first exception
  /// stops what has not begun and is rethrown here. Several threads may call at once.
  using Work = std::function<void(std::uint64_t index, void* block)>;
  void for_each(std::uint64_t count, const Work& work);

 private:
  struct Job {
    const Work& work;
    std::uint64_t count;
    std::uint64_t next = 0;
    std::uint64_t running = 0;
    std::exception_ptr error;
    std::condition_variable done;
  };
  void serve(void* block);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job*> jobs_;  ///< with something left to begin
  bool stopping_ = false;
  BlockMemory blocks_;
  std::vector<std::thread> threads_;
};

}  // namespace reef
