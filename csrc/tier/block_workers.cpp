#include "tier/block_workers.h"

#include <exception>

namespace reef {

BlockWorkers::BlockWorkers(int threads, std::uint64_t block_bytes) : blocks_(threads, block_bytes) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this, block = blocks_.block(i)] { serve(block); });
}

BlockWorkers::~BlockWorkers() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void BlockWorkers::for_each(std::uint64_t count, const Work& work) {
  if (count == 0) return;
  Job job{.work = work, .count = count, .error = nullptr, .done = {}};
  std::unique_lock lock(mutex_);
  jobs_.push_back(&job);
  wake_.notify_all();
  job.done.wait(lock, [&] { return job.next == job.count && job.running == 0; });
  if (job.error) std::rethrow_exception(job.error);
}

void BlockWorkers::serve(void* block) {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    Job& job = *jobs_.front();
    const std::uint64_t index = job.next++;
    if (job.next == job.count) jobs_.pop_front();
    ++job.running;
    lock.unlock();
    std::exception_ptr error;
    try {
      job.work(index, block);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    --job.running;
    if (error && !job.error) {
      job.error = error;
      if (job.next < job.count) {
        job.next = job.count;
        std::erase(jobs_, &job);
      }
    }
    if (job.next == job.count && job.running == 0) job.done.notify_one();
  }
}

}  // namespace reef
