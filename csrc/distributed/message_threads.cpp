#include "distributed/message_threads.h"

#include <ATen/core/grad_mode.h>

#include <chrono>
#include <thread>
#include <utility>

#include "distributed/call_order.h"

namespace reef {
namespace {

constexpr std::chrono::milliseconds kStay{500};

}  // namespace

MessageThreads& MessageThreads::all() {
  static auto* const threads = new MessageThreads;  // threads may wait there when the process ends
  return *threads;
}

void MessageThreads::start(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  if (idle_ <= works_.size()) std::thread([this] { serve(); }).detach();
  works_.push_back(std::move(work));
  given_.notify_one();
}

void MessageThreads::serve() {
  const ServesProgram serves;
  const at::NoGradGuard no_grad;
  std::unique_lock lock(mutex_);
  while (true) {
    if (works_.empty()) {
      ++idle_;
      const bool given = given_.wait_for(lock, kStay, [&] { return !works_.empty(); });
      --idle_;
      if (!given) return;
    }
    {
      const std::function<void()> work = std::move(works_.front());
      works_.pop_front();
      lock.unlock();
      work();
    }
    lock.lock();
  }
}

}  // namespace reef
