#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace reef {

/// A copy between memory and a tier, under way beside the operators.
class Transfer {
 public:
  Transfer() = default;
  virtual ~Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  virtual bool done() = 0;
  /// True if it had not begun, and now never will.
  virtual bool cancel() = 0;
  /// What this thread does next finds it done: on the host, or in the order of its device's stream.
  virtual void wait() = 0;

  std::exception_ptr error;  ///< what it threw; valid when done or waited for, as are the others
  double seconds = 0;        ///< 0: not known
  std::uint64_t hash = 0;    ///< of what was written to the tier
};

/// Runs transfers in the order of submission on threads of its own, which start when there is work for them.
/// It only copies: what a finished transfer means for its page is for the submitter to settle.
class TransferLane {
 public:
  /// Gives the hash of what it has written to a tier.
  using Copy = std::function<std::uint64_t()>;

  /// With one thread, a transfer begins when the one before it has ended; with more, that many overlap.
  explicit TransferLane(std::size_t threads) : most_threads_(threads) {}
  /// Waits for the running transfers; those queued are dropped.
  ~TransferLane();
  TransferLane(const TransferLane&) = delete;
  TransferLane& operator=(const TransferLane&) = delete;

  /// Throws std::system_error if there is no thread and none can be started.
  std::shared_ptr<Transfer> submit(Copy copy);
  /// Runs it on the calling thread.
  static std::shared_ptr<Transfer> run(Copy copy);

 private:
  class Queued;
  void start_thread();
  void serve();

  std::mutex mutex_;
  std::condition_variable submitted_;
  std::condition_variable finished_;
  std::deque<std::shared_ptr<Queued>> queue_;
  bool closing_ = false;
  std::size_t most_threads_;
  std::size_t idle_threads_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace reef
