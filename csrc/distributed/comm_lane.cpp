#include "distributed/comm_lane.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <utility>

namespace reef {

CommLane::~CommLane() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    queue_.clear();
  }
  submitted_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::uint64_t CommLane::submit(std::function<void()> work) {
  std::uint64_t ticket = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    queue_.push_back(std::move(work));
    ticket = ++submitted_count_;
  }
  submitted_.notify_one();
  return ticket;
}

void CommLane::wait(std::uint64_t ticket) {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return finished_count_ >= ticket; });
  if (error_ && ticket >= failed_) std::rethrow_exception(error_);
}

void CommLane::wait_all() {
  std::uint64_t last = 0;
  {
    const std::lock_guard lock(mutex_);
    last = submitted_count_;
  }
  wait(last);
}

void CommLane::serve() {
  const at::NoGradGuard no_grad;
  const at::DisableRecordFunctionGuard unobserved;
  std::unique_lock lock(mutex_);
  while (true) {
    submitted_.wait(lock, [&] { return closing_ || !queue_.empty(); });
    if (closing_) return;
    {
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      const bool failed = error_ != nullptr;
      lock.unlock();
      std::exception_ptr error;
      try {
        if (!failed) work();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      if (error) {
        error_ = error;
        failed_ = finished_count_ + 1;
      }
    }
    ++finished_count_;
    finished_.notify_all();
  }
}

}  // namespace reef
