#include "page/transfer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "quiet_thread.h"

namespace reef {

class TransferLane::Queued final : public Transfer, public std::enable_shared_from_this<Queued> {
 public:
  Queued(Copy copy, Ended ended, bool at_once, TransferLane& lane)
      : copy_(std::move(copy)), ended_(std::move(ended)), at_once_(at_once), lane_(lane) {}

  void run() override {
    const auto started = std::chrono::steady_clock::now();
    try {
      copy_(*this);
    } catch (...) {
      error = std::current_exception();
    }
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    if (ended_) ended_(*this);
    end();
  }
  void start() override { at_once_ ? run() : lane_.submit(shared_from_this()); }

  bool done() override { return done_.load(std::memory_order_acquire); }
  bool cancel() override {
    if (done() || !lane_.drop(*this)) return false;
    cancelled = true;
    end();
    return true;
  }
  void wait() override { done_.wait(false, std::memory_order_acquire); }

 private:
  void end() {
    copy_ = nullptr;  // Breaks cycles: both functions may own an owner of this transfer.
    ended_ = nullptr;
    done_.store(true, std::memory_order_release);
    done_.notify_all();
  }

  Copy copy_;
  Ended ended_;
  const bool at_once_;
  TransferLane& lane_;
  std::atomic<bool> done_ = false;
};

TransferLane::TransferLane(std::size_t threads)
    : AtFork(Order::kLane), most_threads_(threads), state_(std::make_unique<State>()) {}

TransferLane::~TransferLane() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
    state_->queue.clear();
  }
  state_->submitted.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

std::shared_ptr<Transfer> TransferLane::prepare(Copy copy, Ended ended, bool at_once) {
  return std::make_shared<Queued>(std::move(copy), std::move(ended), at_once, *this);
}

void TransferLane::start_thread() {
  try {
    state_->threads.push_back(start_quiet_thread([state = state_.get()] { serve(*state); }));
    ++state_->idle_threads;
  } catch (...) {
    if (state_->threads.empty()) throw;
  }
}

void TransferLane::submit(std::shared_ptr<Queued> transfer) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->queue.size() >= state_->idle_threads && state_->threads.size() < most_threads_)
      start_thread();
    state_->queue.push_back(std::move(transfer));
  }
  state_->submitted.notify_one();
}

bool TransferLane::drop(const Queued& transfer) {
  const std::lock_guard lock(state_->mutex);
  const auto queued = std::find_if(state_->queue.begin(), state_->queue.end(),
                                   [&](const auto& other) { return other.get() == &transfer; });
  if (queued == state_->queue.end()) return false;
  state_->queue.erase(queued);
  return true;
}

void TransferLane::serve(State& state) {
  std::unique_lock lock(state.mutex);
  for (;;) {
    state.submitted.wait(lock, [&] { return state.closing || !state.queue.empty(); });
    if (state.closing) return;
    const std::shared_ptr<Queued> transfer = std::move(state.queue.front());
    state.queue.pop_front();
    --state.idle_threads;
    lock.unlock();
    transfer->run();
    lock.lock();
    ++state.idle_threads;
    state.rested.notify_all();
  }
}

// ---- at a fork

void TransferLane::before_fork() {
  std::unique_lock lock(state_->mutex);
  state_->rested.wait(
      lock, [&] { return state_->queue.empty() && state_->idle_threads == state_->threads.size(); });
  lock.release();
}

void TransferLane::after_fork_in_parent() { state_->mutex.unlock(); }

void TransferLane::after_fork_in_child() {
  // The old state is never destroyed: its threads do not exist here and cannot be joined, and its condition
  // variables still count waiters.
  (void)state_.release();
  state_ = std::make_unique<State>();
}

}  // namespace reef
