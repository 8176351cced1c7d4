#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "reef/collectives.h"
#include "reef/export.h"

namespace reef {

/// Messages between two ranks of a group, which say what they hold: a dense tensor of any dtype, shape,
/// layout and size. Ranks count within `group`. What one rank sends to another arrives in the order in which
/// it was sent, and each receive takes the next; its tag, any number, says which one the program means.
///
/// A receive that means another tag, or receives into another shape or dtype, is an error on both ranks:
/// ConfigError, which names both shapes. That message is lost, nothing is written, and the next ones go on.
/// If a rank is gone they throw RankFailed, as collectives do. Throws ConfigError for a rank that is not
/// another one of the group, for a tensor that is not dense or has no values, and where the group has no gloo
/// for the CPU. Tensors on a device travel by way of the host's memory.

/// Sends the values; on the other side requires_grad is not set. Returns when the receiver has found this
/// message to be what it wants: two ranks that send to each other first wait for each other in vain, until
/// the group's timeout; see isend.
REEF_API void send(const at::Tensor& tensor, int to, const ProcessGroupPtr& group, std::int64_t tag = 0);

/// The tensor that comes, contiguous, on `device`.
REEF_API at::Tensor receive(int from, const ProcessGroupPtr& group, std::int64_t tag = 0,
                            c10::Device device = c10::kCPU);

/// Writes what comes into `tensor`, which must have its shape and dtype. Its contents are undefined after
/// RankFailed.
REEF_API void receive_into(const at::Tensor& tensor, int from, const ProcessGroupPtr& group,
                           std::int64_t tag = 0);

/// A message that is under way. May be dropped: the message goes on, and what would have been thrown is lost.
class REEF_API Message {
 public:
  /// Returns what was received, or the tensor that was given, when the message is through: not before may
  /// what is sent be changed, and what is received be used. Throws as the calls above do.
  at::Tensor wait() const;
  /// wait() would not wait.
  bool is_through() const;

  struct State;
  explicit Message(std::shared_ptr<State> state);

 private:
  std::shared_ptr<State> state_;
};

/// The same without waiting. Their order is that of the calls, also among those that wait.
REEF_API Message isend(const at::Tensor& tensor, int to, const ProcessGroupPtr& group, std::int64_t tag = 0);
REEF_API Message ireceive(int from, const ProcessGroupPtr& group, std::int64_t tag = 0,
                          c10::Device device = c10::kCPU);
REEF_API Message ireceive_into(const at::Tensor& tensor, int from, const ProcessGroupPtr& group,
                               std::int64_t tag = 0);

}  // namespace reef
