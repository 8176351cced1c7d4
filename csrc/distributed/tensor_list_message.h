#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "distributed/message_route.h"

namespace reef {

/// Tensors that travel together from one rank to another: any number, of any dense dtypes and shapes, some of
/// them undefined. What precedes the values says all of this, so the receiver need not know it before.
struct TensorListMessage {
  std::vector<at::Tensor> tensors = {};  ///< from the receiver's view, in order on the CPU
  std::vector<bool> requires_grad = {};  ///< of each tensor
  std::string failed = {};  ///< why there are no tensors, if something has failed that were to make them

  /// Throws ConfigError in the name of the call `name` if a tensor cannot be sent.
  void check(const std::string& name) const;
};

/// Sends a message as number `sequence` of its route, with gloo's tags `tag` and `tag` + 1. Returns when its
/// values may change. Costs one message of 1 KiB, and one for each tensor and each 16 MiB of it. Throws
/// RankFailed.
void send_tensor_list(const MessageRoute& route, const TensorListMessage& message, std::int64_t sequence,
                      int tag);

/// Receives message number `sequence`. Throws RankFailed, and ConfigError if what comes is another message or
/// there is no memory for it.
TensorListMessage receive_tensor_list(const MessageRoute& route, std::int64_t sequence, int tag);

}  // namespace reef
