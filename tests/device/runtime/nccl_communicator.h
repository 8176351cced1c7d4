// A played communicator: the order of its calls, what went wrong in them, and how it begins and ends.
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

/// Why a function of NCCL returns an error.
struct Refusal {
  ncclResult_t result;
  std::string words;
};

/// What each rank of a new communicator tells the others.
struct Newcomer {
  std::array<char, 32> device{};  // address on the bus
  std::int32_t ordinal = 0;
  std::int32_t color = 0, key = 0;  // of a split
  SharedName memory;                // of a split
};
/// Tells of the device that is current.
Newcomer newcomer();

/// Says what is wrong, on stderr and by ncclGetLastError. There is one last error in the process, as in NCCL.
void set_last_error(const std::string& words);
const char* last_error();

}  // namespace reef::played

/// NCCL's name for a communicator. Never freed, so that what calls it after its end is told so.
struct ncclComm {
 public:
  /// Joins the others, without waiting for them. Throws Refusal.
  ncclComm(const reef::played::SharedName& name, int ranks, int rank, const reef::played::Newcomer& as);

  /// Waits until all ranks have joined. Throws Refusal: if two ranks have one device, or a rank has died.
  void meet();
  /// Gives the stream these calls as one work, behind all that the communicator was given before, on whatever
  /// stream. Throws Refusal if the communicator has ended.
  void issue(std::vector<reef::played::Call> calls);
  /// Waits until all calls have run, or one has failed.
  void finish();
  /// Finishes, and takes no more calls.
  void finalize();
  void destroy();
  /// Ends the communicator and the call that runs, whatever it waits for. The work that streams have been
  /// given does nothing.
  void abort();
  /// Returns what each rank tells, in their order. Throws Refusal.
  std::vector<reef::played::Newcomer> gather(const reef::played::Newcomer& mine);

  /// Makes an op that has the factor. It can be used until it is destroyed.
  ncclRedOp_t make_op(ncclDataType_t type, const reef::played::Reduction& reduction);
  void destroy_op(ncclRedOp_t op);
  /// Throws Refusal if there is no such op for elements of the type.
  reef::played::Reduction reduction(ncclRedOp_t op, ncclDataType_t type);

  /// Registered memory is used like any other, so only that it is deregistered is looked at.
  void* register_memory();
  void deregister_memory(void* handle);

  /// Returns what went wrong in a call after it was issued.
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

  // A work's place among the others: passed on once it has run, or cannot run any more.
  class Turn;

  void run(const std::vector<reef::played::Call>& calls, reef::played::Mailboxes& mailboxes);
  void explain(const reef::played::Call& call, const reef::played::Outcome& outcome,
               reef::played::Mailboxes& mailboxes);
  void say(ncclResult_t result, const std::string& words);
  void end(const char* how);

  const int ranks_, rank_;
  const reef::played::Newcomer device_;
  std::mutex issuing_;  // tickets and streams are in one order
  std::mutex mutex_;    // of all that follows; nothing of CUDA is called under it
  std::condition_variable changed_;
  std::shared_ptr<reef::played::Mailboxes> mailboxes_;  // null after the end
  std::string ended_;                                   // how
  std::uint64_t issued_ = 0, turn_ = 0;                 // of works that no graph has
  std::set<std::uint64_t> passed_;                      // before it was their turn
  bool runs_ = false;
  ncclResult_t trouble_ = ncclSuccess;
  std::map<int, Op> ops_;
  int next_op_ = ncclNumOps;
  std::set<void*> registered_;
};
