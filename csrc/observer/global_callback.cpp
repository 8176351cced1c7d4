#include "observer/global_callback.h"

#include <c10/util/Exception.h>

#include <chrono>

#include "deadline.h"

namespace reef {

void GlobalCallback::add(const at::RecordFunctionCallback& callback) {
  const std::lock_guard lock(mutex_);
  if (handle_ == 0) change(callback);
}

void GlobalCallback::remove() {
  const std::lock_guard lock(mutex_);
  if (handle_ == 0 || forked_) return;
  at::removeCallback(handle_);
  handle_ = 0;
}

void GlobalCallback::replace(const at::RecordFunctionCallback& callback) {
  const std::lock_guard lock(mutex_);
  change(callback);
}

// Removes the one that is there, and adds this one.
void GlobalCallback::change(const at::RecordFunctionCallback& callback) {
  const auto changed = [before = handle_, callback] {
    if (before != 0) at::removeCallback(before);
    return at::addGlobalCallback(callback);
  };
  if (!forked_) {
    handle_ = changed();
    return;
  }
  constexpr std::chrono::seconds kLockIsFree{10};
  const auto handle = within(std::chrono::steady_clock::now() + kLockIsFree, changed);
  TORCH_CHECK(
      handle,
      "this process was forked while another thread of its parent held LibTorch's lock for "
      "observers, so nothing that observes operators (a budget, a ledger, a shard) can begin here: begin "
      "it before the fork, or fork before threads run operators.");
  handle_ = *handle;
}

// With the lock, so that nothing changes after this thread has looked.
void GlobalCallback::before_fork() {
  mutex_.lock();
  (void)at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
}

void GlobalCallback::after_fork_in_child() {
  forked_ = true;
  mutex_.unlock();
}

}  // namespace reef
