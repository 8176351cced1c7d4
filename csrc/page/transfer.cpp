#include "page/transfer.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <utility>

namespace reef {

class TransferLane::Queued final : public Transfer {
 public:
  Queued(Copy copy, TransferLane* lane) : copy_(std::move(copy)), lane_(lane) {}

  bool done() override { return done_.load(std::memory_order_acquire); }

  bool cancel() override {
    if (done()) return false;
    const std::lock_guard lock(lane_->mutex_);
    const auto queued = std::find_if(lane_->queue_.begin(), lane_->queue_.end(),
                                     [&](const auto& other) { return other.get() == this; });
    if (queued == lane_->queue_.end()) return false;
    lane_->queue_.erase(queued);
    return true;
  }

  void wait() override {
    if (done()) return;
    std::unique_lock lock(lane_->mutex_);
    lane_->finished_.wait(lock, [&] { return done(); });
  }

  void run() {
    const auto started = std::chrono::steady_clock::now();
    try {
      hash = copy_();
    } catch (...) {
      error = std::current_exception();
    }
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  }

  void finish() { done_.store(true, std::memory_order_release); }

 private:
  Copy copy_;
  TransferLane* lane_;
  std::atomic<bool> done_ = false;
};

TransferLane::~TransferLane() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    queue_.clear();
  }
  submitted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void TransferLane::start_thread() {
  // Signals are for the program's own threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    threads_.emplace_back([this] { serve(); });
    ++idle_threads_;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (threads_.empty()) throw;
    return;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

std::shared_ptr<Transfer> TransferLane::submit(Copy copy) {
  auto transfer = std::make_shared<Queued>(std::move(copy), this);
  {
    const std::lock_guard lock(mutex_);
    if (queue_.size() >= idle_threads_ && threads_.size() < most_threads_) start_thread();
    queue_.push_back(transfer);
  }
  submitted_.notify_one();
  return transfer;
}

std::shared_ptr<Transfer> TransferLane::run(Copy copy) {
  auto transfer = std::make_shared<Queued>(std::move(copy), nullptr);
  transfer->run();
  transfer->finish();
  return transfer;
}

void TransferLane::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    submitted_.wait(lock, [&] { return closing_ || !queue_.empty(); });
    if (closing_) return;
    const std::shared_ptr<Queued> transfer = std::move(queue_.front());
    queue_.pop_front();
    --idle_threads_;
    lock.unlock();
    transfer->run();
    lock.lock();
    ++idle_threads_;
    transfer->finish();
    finished_.notify_all();
  }
}

}  // namespace reef
