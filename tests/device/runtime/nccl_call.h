// A call of one of NCCL's communicating functions, and how it runs on the ranks' mailboxes.
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
  std::size_t count = 0;  // The argument `count` of the function.
  int root = 0;           // For functions with a root; for kSend and kRecv, the peer.
  Reduction reduction;    // For functions that reduce.
  const void* send = nullptr;
  void* receive = nullptr;
  cudaStream_t stream = nullptr;

  bool is_collective() const { return function != Function::kSend && function != Function::kRecv; }
  bool reduces() const;
  bool has_root() const;
  std::size_t bytes() const { return count * bytes_of(type); }
  /// Returns the label that this rank sends with the call. All ranks of a collective must send the same
  /// label, and the receiver of a send checks it.
  Label label() const;
};

/// Describes the call with NCCL's names, for error messages.
std::string describe(const Call& call);
/// Describes the call of the rank that sends this label.
std::string describe(const Label& label);

/// Runs a collective of the ranks that share the mailboxes. Must be called by the work of a stream, which can
/// access device memory. Every rank waits for every other rank, even if NCCL need not wait.
Outcome run_collective(const Call& call, Mailboxes& mailboxes);
/// Runs sends and receives at the same time. A sender waits until everything is received.
Outcome run_messages(const std::vector<Call>& calls, Mailboxes& mailboxes);
/// Matches the messages that this rank sends to itself, and copies them if `copies`. Returns false, without a
/// copy, if sends and receives do not match.
bool match_with_itself(const std::vector<Call>& calls, int rank, bool copies);

}  // namespace reef::played
