#pragma once

#include <csignal>
#include <ctime>

namespace reef {

/// While it lives, SIGPIPE is blocked on this thread and on the threads started from it, which keep it
/// blocked. gloo writes to sockets without MSG_NOSIGNAL on threads of its own; a rank whose neighbour has
/// died would be ended by the signal, before it could say who died, in any program that does not ignore it
/// (Python does).
class SigpipeBlocked {
 public:
  SigpipeBlocked() {
    ::sigset_t pending;
    ::sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &sigpipe_, &previous_);
  }
  ~SigpipeBlocked() {
    const ::timespec at_once{};
    // What came meanwhile would otherwise be delivered now.
    if (!was_pending_) ::sigtimedwait(&sigpipe_, nullptr, &at_once);
    ::pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
  }
  SigpipeBlocked(const SigpipeBlocked&) = delete;
  SigpipeBlocked& operator=(const SigpipeBlocked&) = delete;

 private:
  ::sigset_t sigpipe_{};
  ::sigset_t previous_{};
  bool was_pending_ = false;
};

}  // namespace reef
