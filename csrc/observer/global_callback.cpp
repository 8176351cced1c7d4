#include "observer/global_callback.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "deadline.h"

namespace reef {
namespace {

constexpr std::chrono::seconds kLockIsFree{10};  // by then, unless nobody is there to release it

// Takes the lock and releases it, as a thread does that calls its first operator.
bool take_lock() {
  (void)at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  return true;
}

}  // namespace

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
  take_lock();
}

void GlobalCallback::after_fork_in_child() {
  forked_ = true;
  is_unsure_ = true;
  mutex_.unlock();
}

void GlobalCallback::make_sure() {
  const std::lock_guard lock(mutex_);
  if (!is_unsure_) return;
  if (!within(std::chrono::steady_clock::now() + kLockIsFree, take_lock)) {
    std::fputs(
        "reef: this process was forked while another thread of its parent held LibTorch's lock for "
        "observers. Nobody releases it here, and a backward pass would wait for it for ever, so the process "
        "ends: fork again, or before threads run operators.\n",
        stderr);
    std::abort();
  }
  is_unsure_ = false;
}

}  // namespace reef
