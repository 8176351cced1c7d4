#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "distributed/message_route.h"
#include "tensor_layout.h"

namespace reef {

/// Tensors that travel together from one rank to another: any number, of any dense dtypes and shapes, some of
/// them undefined. What precedes the values says all of this, so the receiver need not know it before.
struct TensorListMessage {
  std::vector<at::Tensor> tensors = {};  ///< what was received lies in order on the CPU
  /// The layout that each tensor had where it was made. Its strides are empty if the tensor was contiguous
  /// and aligned.
  std::vector<TensorLayout> layouts = {};
  std::vector<bool> requires_grad = {};  ///< of each tensor
  std::string failed = {};               ///< why there are no tensors, if what was to make them has failed

  /// Throws ConfigError in the name of the call `name` if a tensor cannot be sent.
  void check(const std::string& name) const;
};

/// How many bytes of values may travel with what precedes them, which both ends know: as many as an earlier
/// message of the same stream had, one that has been received when the receive of this one begins.
class MessageRoom {
 public:
  /// Of message `number`.
  std::int64_t bytes(std::int64_t number, std::int64_t stream) const;
  void note(std::int64_t number, std::int64_t stream, std::int64_t bytes);

  static constexpr std::int64_t kAhead = 2;  ///< how many receives have begun at most

 private:
  struct Noted {
    std::int64_t number, bytes;
  };
  std::map<std::int64_t, std::deque<Noted>> noted_;  ///< by stream
};

/// One end of a route on which lists of tensors travel, numbered from 0, with gloo's tags `tag` and `tag`
/// + 1. Each message is of a stream, of which messages are mostly alike; both ends know which.
class TensorListSender {
 public:
  TensorListSender(MessageRoute route, int tag) : route_(std::move(route)), tag_(tag) {}
  /// Returns when the values may change. Costs one message of gloo, of 1 KiB and a copy of the values, if
  /// there is room for them, and otherwise one more for each tensor and each 16 MiB of it. Throws RankFailed.
  void send(const TensorListMessage& message, std::int64_t stream);

 private:
  MessageRoute route_;
  int tag_;
  std::int64_t number_ = 0;
  MessageRoom room_;
};

class TensorListReceiver {
 public:
  TensorListReceiver(MessageRoute route, int tag) : route_(std::move(route)), tag_(tag) {}
  /// Posts the receive of the next message, so that the sender need not wait for it. At most
  /// MessageRoom::kAhead receives may be posted and not taken. Throws RankFailed.
  void begin(std::int64_t stream);
  /// Waits for the first message whose receive has been posted. Throws RankFailed, and ConfigError if what
  /// comes is another message or there is no memory for it.
  TensorListMessage take();

 private:
  struct Coming {
    std::int64_t stream;
    at::Tensor first;  ///< what precedes the values, and room for them
    std::exception_ptr no_memory;
    c10::intrusive_ptr<c10d::Work> work;
  };
  MessageRoute route_;
  int tag_;
  std::int64_t begun_ = 0, taken_ = 0;
  MessageRoom room_;
  std::deque<Coming> coming_;
};

}  // namespace reef
