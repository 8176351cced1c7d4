#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace reef {

/// A copy between memory and a tier that runs beside the operators.
struct Transfer {
  enum class State : std::uint8_t { kQueued, kRunning, kDone };

  explicit Transfer(std::function<std::uint64_t()> what) : copy(std::move(what)) {}

  std::function<std::uint64_t()> copy;
  std::uint64_t hash = 0;    ///< what it gave
  std::exception_ptr error;  ///< what it threw; valid when done, as are the seconds
  double seconds = 0;
  std::atomic<State> state = State::kQueued;

  bool done() const { return state.load(std::memory_order_acquire) == State::kDone; }
};

/// Runs transfers one after the other, in the order of submission, on a thread of its own that starts with
/// the first. It only copies: what a finished transfer means for its page is for the submitter to settle.
class TransferLane {
 public:
  TransferLane() = default;
  /// Waits for the running transfer; those queued are dropped.
  ~TransferLane();
  TransferLane(const TransferLane&) = delete;
  TransferLane& operator=(const TransferLane&) = delete;

  /// Throws std::system_error if the thread cannot be started.
  void submit(std::shared_ptr<Transfer> transfer);
  /// True if it had not begun, and now never will.
  bool cancel(Transfer& transfer);
  void wait(const Transfer& transfer);
  /// Until nothing is queued or runs.
  void drain();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable submitted_;
  std::condition_variable finished_;
  std::deque<std::shared_ptr<Transfer>> queue_;
  bool running_ = false;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace reef
