// A played communicator: its beginning and end, the order of its calls, and their errors.
#pragma once

#include <nccl.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "device/runtime/nccl_call.h"
#include "device/runtime/nccl_mailboxes.h"

namespace reef::played {

/// The error that a function of NCCL returns.
struct Refusal {
  ncclResult_t result;
  std::string words;
};

/// What each rank of a new communicator tells the others.
struct Newcomer {
  std::array<char, 32> device{};  // The device's address on the PCI bus.
  std::int32_t ordinal = 0;
  std::int32_t color = 0, key = 0;  // For a split.
  SharedName memory;                // For a split.
};
/// Describes the current device.
Newcomer newcomer();

/// Reports an error on stderr and through ncclGetLastError. As in NCCL, there is one last error in a process.
void set_last_error(const std::string& words);
const char* last_error();

}  // namespace reef::played

/// A communicator; the name is NCCL's. It is never freed, so that calls after its end get an error.
struct ncclComm {
 public:
  /// Joins the other ranks without waiting for them. Throws Refusal.
  ncclComm(const reef::played::SharedName& name, int ranks, int rank, const reef::played::Newcomer& as);

  /// Waits until all ranks have joined. Throws Refusal if two ranks have the same device or a rank has died.
  void meet();
  /// Enqueues these calls on their stream as one piece of work, which runs after all earlier calls of this
  /// communicator on any stream. Throws Refusal if the communicator has ended.
  void issue(std::vector<reef::played::Call> calls);
  /// Waits until all calls have run or one has failed.
  void finish();
  /// Finishes, and accepts no more calls.
  void finalize();
  void destroy();
  /// Ends the communicator and the call that is running, whatever it waits for. Calls that are still enqueued
  /// on streams will do nothing.
  void abort();
  /// Sends `mine` to all ranks and returns what each rank has sent, in the order of ranks. Throws Refusal.
  std::vector<reef::played::Newcomer> gather(const reef::played::Newcomer& mine);

  /// Makes an op for a reduction with a factor. It can be used until it is destroyed.
  ncclRedOp_t make_op(ncclDataType_t type, const reef::played::Reduction& reduction);
  void destroy_op(ncclRedOp_t op);
  /// Throws Refusal if there is no such op for elements of the type.
  reef::played::Reduction reduction(ncclRedOp_t op, ncclDataType_t type);

  /// Registration has no effect; it is only checked that deregistered memory was registered.
  void* register_memory();
  void deregister_memory(void* handle);

  /// Returns the first error of a call after it was issued, or ncclSuccess.
  ncclResult_t trouble();
  /// Throws Refusal if the communicator has ended.
  std::shared_ptr<reef::played::Mailboxes> open_mailboxes();
  int ranks() const { return ranks_; }
  int rank() const { return rank_; }
  const reef::played::Newcomer& device() const { return device_; }

 private:
  struct Op {
    ncclDataType_t type;
    reef::played::Reduction reduction;
  };

  // A call's turn among all calls of the communicator. The turn passes on when the call has run or can no
  // longer run.
  class Turn;

  void run(const std::vector<reef::played::Call>& calls, reef::played::Mailboxes& mailboxes);
  void explain(const reef::played::Call& call, const reef::played::Outcome& outcome,
               reef::played::Mailboxes& mailboxes);
  void say(ncclResult_t result, const std::string& words);
  void end(const char* how);

  const int ranks_, rank_;
  const reef::played::Newcomer device_;
  std::mutex issuing_;  // Keeps tickets in the order in which streams get the calls.
  std::mutex mutex_;    // Guards everything below; no function of CUDA is called while it is held.
  std::condition_variable changed_;
  std::shared_ptr<reef::played::Mailboxes> mailboxes_;  // Null after the end.
  std::string ended_;                                   // How the communicator has ended.
  std::uint64_t issued_ = 0, turn_ = 0;                 // Tickets, which calls in a graph do not have.
  std::set<std::uint64_t> passed_;                      // Tickets that were passed on before their turn.
  bool runs_ = false;
  ncclResult_t trouble_ = ncclSuccess;
  std::map<int, Op> ops_;
  int next_op_ = ncclNumOps;
  std::set<void*> registered_;
};
