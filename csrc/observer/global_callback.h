#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <mutex>

#include "fork.h"

namespace reef {

/// A callback of LibTorch's record functions, on all threads. Never destroyed; used by any thread.
///
/// LibTorch has a lock for them, which a thread takes when it first calls an operator after they have
/// changed, and in each backward pass, and which no fork finds at rest: a child in which it is held would
/// wait for it for ever. So the thread that forks takes it before, for what has changed so far, and a child
/// changes nothing that it need not: what was added stays there, and must do nothing where it is not wanted.
/// If a child must change something, and the lock is held, it throws c10::Error; for a backward pass there is
/// need_lock().
class GlobalCallback final : private AtFork {
 public:
  GlobalCallback() : AtFork(Order::kCallbacks) {}

  /// Does nothing while one is there.
  void add(const at::RecordFunctionCallback& callback);
  /// In a forked child the callback stays.
  void remove();
  /// In place of the one that is there, if there is one.
  void replace(const at::RecordFunctionCallback& callback);
  /// Before the calling thread needs the lock, as a backward pass will. In a forked child, where another
  /// thread of the parent held it, this says so and aborts the process, which would hang. Costs a load, and
  /// in a child a thread once.
  void need_lock() {
    if (is_unsure_.load(std::memory_order_relaxed)) make_sure();
  }

 private:
  void make_sure();
  void change(const at::RecordFunctionCallback& callback);
  void before_fork() override;
  void after_fork_in_parent() override { mutex_.unlock(); }
  void after_fork_in_child() override;

  std::mutex mutex_;
  at::CallbackHandle handle_ = 0;  ///< 0: none
  bool forked_ = false;
  std::atomic<bool> is_unsure_{false};  ///< of the lock: in a child that has not tried it
};

}  // namespace reef
