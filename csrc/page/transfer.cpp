#include "page/transfer.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <csignal>

namespace reef {

TransferLane::~TransferLane() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    queue_.clear();
  }
  submitted_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void TransferLane::submit(std::shared_ptr<Transfer> transfer) {
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) {
      // Signals are for the program's own threads.
      sigset_t all;
      sigset_t before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      try {
        thread_ = std::thread([this] { run(); });
      } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
      }
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    queue_.push_back(std::move(transfer));
  }
  submitted_.notify_one();
}

bool TransferLane::cancel(Transfer& transfer) {
  const std::lock_guard lock(mutex_);
  const auto queued =
      std::find_if(queue_.begin(), queue_.end(), [&](const auto& other) { return other.get() == &transfer; });
  if (queued == queue_.end()) return false;
  queue_.erase(queued);
  return true;
}

void TransferLane::wait(const Transfer& transfer) {
  if (transfer.done()) return;
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return transfer.done(); });
}

void TransferLane::drain() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return queue_.empty() && !running_; });
}

void TransferLane::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    submitted_.wait(lock, [&] { return closing_ || !queue_.empty(); });
    if (closing_) return;
    const std::shared_ptr<Transfer> transfer = std::move(queue_.front());
    queue_.pop_front();
    running_ = true;
    transfer->state = Transfer::State::kRunning;
    lock.unlock();
    const auto started = std::chrono::steady_clock::now();
    try {
      transfer->hash = transfer->copy();
    } catch (...) {
      transfer->error = std::current_exception();
    }
    transfer->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    lock.lock();
    running_ = false;
    transfer->state = Transfer::State::kDone;
    finished_.notify_all();
  }
}

}  // namespace reef
