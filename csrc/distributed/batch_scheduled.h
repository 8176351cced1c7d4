#pragma once

#include <sched.h>

namespace reef {

/// While it lives, this thread, and for good the threads started from it, are scheduled as SCHED_BATCH: what
/// wakes them does not take the processor from the thread that runs there. If that is refused, nothing
/// changes.
///
/// Without it a message that arrives interrupts what computes. And gloo's own thread, woken by a reply,
/// interrupts the thread that is still sending and holds the connection's mutex; it then asks for the mutex
/// in a loop until the sender has a processor again. Small messages between two ranks on two cores took three
/// times as long.
class BatchScheduled {
 public:
  BatchScheduled() : policy_(::sched_getscheduler(0)) {
    if (policy_ == SCHED_OTHER) set(SCHED_BATCH);
  }
  ~BatchScheduled() {
    if (policy_ == SCHED_OTHER) set(SCHED_OTHER);
  }
  BatchScheduled(const BatchScheduled&) = delete;
  BatchScheduled& operator=(const BatchScheduled&) = delete;

 private:
  static void set(int policy) {
    const ::sched_param without_priority{};
    ::sched_setscheduler(0, policy, &without_priority);
  }

  int policy_;
};

}  // namespace reef
