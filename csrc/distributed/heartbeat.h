#pragma once

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "deadline.h"
#include "distributed/call_order.h"
#include "distributed/store.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace reef {

/// Writes this rank's sign of life to the store every tenth of `silence`, with the calls that it has made if
/// these are the same as before, and watches those of others while this rank waits for them. A process that
/// is stopped, or whose machine hangs, closes no connection: only its silence tells. A rank that has gone
/// another way than this one will not come to where it waits: its calls tell. Each rank watches the next
/// four, and what any has found ends the waiting of all.
class Heartbeat {
 public:
  /// `store` must hold keys of this group alone, and answer after a while or not at all; a connection of its
  /// own is made to it. When `stop_key` is there, a rank has failed. What is found is published there by
  /// these, which give what it says then.
  struct Findings {
    std::function<std::string(int rank)> silent;
    std::function<std::string(const std::string& sentence)> out_of_step;
  };
  Heartbeat(const StorePtr& store, int rank, int size, milliseconds silence, std::string stop_key,
            Findings found);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  struct Silence : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  /// As wait_connected(), or work->wait() of a collective in the group with this backend, whichever runs it;
  /// throws Silence as soon as a rank, or the store, is known to be silent, any rank to have failed, or ranks
  /// to be out of step. The thread with which gloo runs a collective goes on waiting, for the group's
  /// timeout.
  void wait_for_message(const WorkPtr& work, c10d::Backend& gloo, int rank);
  void wait_for_collective(const WorkPtr& work, c10d::Backend& gloo);
  /// Ends all that this rank waits for: it knows that a rank is gone.
  void fail();
  /// Throws Silence if that has ended: nothing may be sent any more, or ranks that have not heard of it would
  /// take it for what they wait for.
  void check() const;
  /// What `stop_key` said when that ended; "": nobody has looked.
  std::string stopped_by() const;

  /// Until what is returned ends, `look` is called at each beat while the program itself, and not only a
  /// lane, waits as above for longer than from one beat to the next. It must neither wait nor throw.
  std::shared_ptr<void> while_waiting(std::function<void()> look);

  /// For who watches ranks whose going is no failure of this one: gives their last beats, each of which
  /// differs from the one before; "" of a rank that will not beat again. Waits for the store. Owns what it
  /// uses.
  std::function<std::vector<std::string>()> beats_reader(std::vector<int> ranks) const;
  milliseconds silence() const { return silence_; }

  /// Of this rank, in the groups that have this heartbeat.
  CallOrder& calls() { return *calls_; }

 private:
  struct Shared;
  struct Watch;
  void run(Watch watch);
  void run_without_store(milliseconds interval);
  static void say_left(const Watch& watch);

  std::shared_ptr<Shared> shared_;
  std::shared_ptr<CallOrder> calls_;
  milliseconds silence_;
  StorePtr store_;
  std::thread thread_;
};

}  // namespace reef
