// One call of NCCL's functions that communicate, and what it does in the ranks' mailboxes.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "device/runtime/nccl_combine.h"
#include "device/runtime/nccl_mailboxes.h"

namespace reef::played {

enum class Function : std::uint8_t {
  kAllReduce,
  kReduce,
  kBroadcast,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kGather,
  kScatter,
  kSend,
  kRecv
};

struct Call {
  Function function = Function::kAllReduce;
  ncclDataType_t type = ncclFloat32;
  std::size_t count = 0;  // as the function takes it
  int root = 0;           // of those that have one; the peer of kSend and kRecv
  Reduction reduction;    // of those that reduce
  const void* send = nullptr;
  void* receive = nullptr;
  cudaStream_t stream = nullptr;

  bool is_collective() const { return function != Function::kSend && function != Function::kRecv; }
  bool reduces() const;
  bool has_root() const;
  std::size_t bytes() const { return count * bytes_of(type); }
  /// What this rank sends with the call. All ranks must send the same; the receiver of a send expects it.
  Label label() const;
};

/// Reads as the call did, with NCCL's names.
std::string describe(const Call& call);
/// Reads as the call of the rank that sends with this label.
std::string describe(const Label& label);

/// Runs a collective of the ranks that share the mailboxes, on memory that this thread reaches. Every rank
/// waits for every other, even where NCCL may do without.
Outcome run_collective(const Call& call, Mailboxes& mailboxes);
/// Runs sends and receives at the same time. Who sends waits until all is received.
Outcome run_messages(const std::vector<Call>& calls, Mailboxes& mailboxes);
/// Copies from sends of this rank to itself to its receives. Returns false, without a copy, if they do not
/// match.
bool match_with_itself(const std::vector<Call>& calls, int rank, bool copies);

}  // namespace reef::played
