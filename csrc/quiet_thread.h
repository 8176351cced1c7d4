#pragma once

#include <pthread.h>

#include <csignal>
#include <thread>
#include <utility>

namespace reef {

/// Starts a thread that receives no signals: those are for the program's own threads. Throws
/// std::system_error if the system has no thread left.
template <class Run>
std::thread start_quiet_thread(Run run) {
  struct SignalsBlocked {
    sigset_t before;
    SignalsBlocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  } const blocked;  // which the new thread inherits
  return std::thread(std::move(run));
}

}  // namespace reef
