#pragma once

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "distributed/deadline.h"
#include "distributed/store.h"

namespace c10d {
class Work;
}  // namespace c10d

namespace reef {

/// This rank's sign of life, in the store every tenth of `silence`; and an eye on those of others while this
/// rank waits for them. A process that is stopped, or whose machine hangs, closes no connection: only its
/// silence tells. Each rank watches the next four, and what any has found ends the waiting of all.
class Heartbeat {
 public:
  /// `store` must hold keys of this group alone, and answer after a while or not at all; a connection of its
  /// own is made to it. When `stop_key` is there, a rank has failed. `found` publishes that this rank has
  /// fallen silent.
  Heartbeat(const StorePtr& store, int rank, int size, milliseconds silence, std::string stop_key,
            std::function<void(int rank)> found);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  struct Silence : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  /// As work->wait(), of a message between two ranks or of a collective; throws Silence as soon as a rank, or
  /// the store, is known to be silent, or any rank to have failed. The thread with which gloo runs a
  /// collective goes on waiting, for the group's timeout.
  void wait_for_message(const WorkPtr& work);
  void wait_for_collective(const WorkPtr& work);
  /// Ends all that this rank waits for: it knows that a rank is gone.
  void fail();

 private:
  struct Shared;
  struct Watch;
  void run(Watch watch);
  static void say_left(const Watch& watch);

  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

}  // namespace reef
