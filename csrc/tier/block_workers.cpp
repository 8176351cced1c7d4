#include "tier/block_workers.h"

#include <exception>

namespace reef {

BlockWorkers::BlockWorkers(int threads, std::uint64_t block_bytes)
    : AtFork(Order::kWorkers), blocks_(threads, block_bytes), state_(std::make_unique<State>()) {
  for (int i = 0; i < threads; ++i) {
    state_->threads.emplace_back([state = state_.get(), block = blocks_.block(i)] { serve(*state, block); });
  }
}

BlockWorkers::~BlockWorkers() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->wake.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

void BlockWorkers::for_each(std::uint64_t count, const Work& work) {
  if (count == 0) return;
  std::unique_lock lock(state_->mutex);
  if (state_->threads.empty()) {
    for (std::uint64_t index = 0; index < count; ++index) work(index, blocks_.block(0));
    return;
  }
  Job job{.work = work, .count = count, .error = nullptr, .done = {}};
  state_->jobs.push_back(&job);
  ++state_->under_way;
  state_->wake.notify_all();
  job.done.wait(lock, [&] { return job.next == job.count && job.running == 0; });
  if (--state_->under_way == 0) state_->rested.notify_all();
  if (job.error) std::rethrow_exception(job.error);
}

void BlockWorkers::serve(State& state, void* block) {
  std::unique_lock lock(state.mutex);
  for (;;) {
    state.wake.wait(lock, [&] { return state.stopping || !state.jobs.empty(); });
    if (state.jobs.empty()) return;
    Job& job = *state.jobs.front();
    const std::uint64_t index = job.next++;
    if (job.next == job.count) state.jobs.pop_front();
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
        std::erase(state.jobs, &job);
      }
    }
    if (job.next == job.count && job.running == 0) job.done.notify_one();
  }
}

// ---- at a fork

void BlockWorkers::before_fork() {
  std::unique_lock lock(state_->mutex);
  state_->rested.wait(lock, [&] { return state_->under_way == 0; });
  lock.release();
}

void BlockWorkers::after_fork_in_parent() { state_->mutex.unlock(); }

void BlockWorkers::after_fork_in_child() {
  // Never destroyed: its threads are not there to be joined, and its conditions have waiters for ever.
  (void)state_.release();
  state_ = std::make_unique<State>();
}

}  // namespace reef
