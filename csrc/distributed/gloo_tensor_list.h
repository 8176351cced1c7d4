#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <string>
#include <utility>

#include "distributed/message_route.h"
#include "distributed/tensor_list_route.h"

namespace reef {

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

/// Sends lists of tensors by gloo, with the tags `tag` and `tag` + 1. A list costs one message of 1 KiB plus
/// a copy of the values if there is room for them; otherwise it costs one more message for each 16 MiB, or
/// part of them, of each tensor.
class GlooTensorListSender final : public TensorListSender {
 public:
  GlooTensorListSender(MessageRoute route, int tag) : route_(std::move(route)), tag_(tag) {}
  bool send_at_once(const TensorListMessage&) override { return false; }
  void send(const TensorListMessage& message, std::int64_t stream) override;

 private:
  MessageRoute route_;
  int tag_;
  std::int64_t number_ = 0;
  MessageRoom room_;
};

class GlooTensorListReceiver final : public TensorListReceiver {
 public:
  GlooTensorListReceiver(MessageRoute route, int tag) : route_(std::move(route)), tag_(tag) {}
  /// Posts the receive of the next message, so that the sender need not wait for it. At most
  /// MessageRoom::kAhead receives may be posted and not taken.
  void begin(std::int64_t stream) override;
  TensorListMessage take() override;

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
