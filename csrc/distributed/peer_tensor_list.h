#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "distributed/message_route.h"
#include "distributed/peer_connection.h"
#include "distributed/tensor_list_route.h"

namespace reef {

/// Sends lists of tensors on a connection of its own; `route` says in whose group. Copies nothing.
class PeerTensorListSender final : public TensorListSender {
 public:
  PeerTensorListSender(MessageRoute route, std::shared_ptr<PeerConnection> connection)
      : route_(std::move(route)), connection_(std::move(connection)) {}
  bool send_at_once(const TensorListMessage& message) override;
  void send(const TensorListMessage& message, std::int64_t stream) override;

 private:
  MessageRoute route_;
  std::shared_ptr<PeerConnection> connection_;
  std::int64_t number_ = 0;
  std::size_t sent_ = 0;  ///< bytes of the next message
};

class PeerTensorListReceiver final : public TensorListReceiver {
 public:
  PeerTensorListReceiver(MessageRoute route, std::shared_ptr<PeerConnection> connection)
      : route_(std::move(route)), connection_(std::move(connection)) {}
  void begin(std::int64_t) override {}
  TensorListMessage take() override;

 private:
  MessageRoute route_;
  std::shared_ptr<PeerConnection> connection_;
  std::int64_t number_ = 0;
};

}  // namespace reef
