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
#include <optional>
#include <thread>
#include <vector>

#include "fork.h"

namespace reef {

/// A copy between memory and a tier. It needs no lock but its own and the tier's, so whoever waits for it
/// waits for input and output only. Any failure, including one of the device, becomes its `error`: done() and
/// wait() throw nothing, because they are called where nothing may be thrown.
class Transfer {
 public:
  Transfer() = default;
  virtual ~Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  /// Copies on the calling thread, and returns when wait() would. Must be called once only, and not after
  /// start().
  virtual void run() { wait(); }
  /// Copies on another thread, unless that would take longer than to copy here. Throws std::system_error if
  /// no thread can be started.
  virtual void start() {}

  virtual bool done() = 0;
  /// Cancels a copy that was started but has not begun; it is done then. Returns false if that is not
  /// possible.
  virtual bool cancel() = 0;
  /// Waits until the copy is done: on the host, or by making this thread's stream wait. Any thread may call
  /// it any number of times.
  virtual void wait() = 0;

  // Results, valid when the copy is done or was waited for.
  bool cancelled = false;             ///< nothing was copied
  bool same = false;                  ///< nothing was written, because the tier had the same bytes
  bool busy = false;                  ///< cancelled because a device was using the memory
  std::exception_ptr error;           ///< what the copy threw
  double seconds = 0;                 ///< duration, or 0 if it is not known
  std::optional<std::uint64_t> hash;  ///< of what was written to the tier, if wanted
};

/// Runs transfers in the order of submission on threads of its own, which start when there is work for them.
class TransferLane final : public AtFork {
 public:
  /// Copies, and sets the results of the transfer.
  using Copy = std::function<void(Transfer&)>;
  /// Runs on the thread that copied when the copy has ended, before wait() returns. Does not run for a
  /// transfer that was cancelled before it began.
  using Ended = std::function<void(Transfer&)>;

  /// With one thread, a transfer begins when the one before it has ended; with more, up to `threads` overlap.
  explicit TransferLane(std::size_t threads);
  /// Waits for the running transfers, and drops those that are queued.
  ~TransferLane();

  /// Makes a transfer for Transfer::run() or start(). With `at_once`, start() runs it on the calling thread,
  /// because it takes less time than waking another thread.
  std::shared_ptr<Transfer> prepare(Copy copy, Ended ended = nullptr, bool at_once = false);

  /// Waits until everything that was submitted is done.
  void before_fork() override;
  void after_fork_in_parent() override;
  /// Starts over without threads.
  void after_fork_in_child() override;

 private:
  class Queued;
  /// The state, which is replaced as a whole in a forked child.
  struct State {
    std::mutex mutex;
    std::condition_variable submitted;
    std::condition_variable rested;
    std::deque<std::shared_ptr<Queued>> queue;
    bool closing = false;
    std::size_t idle_threads = 0;
    std::vector<std::thread> threads;
  };
  void submit(std::shared_ptr<Queued> transfer);
  bool drop(const Queued& transfer);
  void start_thread();
  static void serve(State& state);

  std::size_t most_threads_;
  std::unique_ptr<State> state_;
};

}  // namespace reef
