#pragma once

#include <cstdint>

#include "distributed/tensor_list_message.h"

namespace reef {

/// One end of a route for lists of tensors, which are numbered from 0. Each message belongs to a stream,
/// which both ends know; the messages of a stream mostly have the same size.
class TensorListSender {
 public:
  virtual ~TensorListSender() = default;
  /// Sends the next message as far as possible without waiting, on any thread, while no send() is under way.
  /// Returns whether all of it is sent. If not, pass the same message to send() next.
  virtual bool send_at_once(const TensorListMessage& message) = 0;
  /// Returns when the values may change. Throws RankFailed.
  virtual void send(const TensorListMessage& message, std::int64_t stream) = 0;
};

class TensorListReceiver {
 public:
  virtual ~TensorListReceiver() = default;
  /// Announces that the next message will be taken. At most MessageRoom::kAhead messages may be announced and
  /// not yet taken. Throws RankFailed.
  virtual void begin(std::int64_t stream) = 0;
  /// Waits for the first message that is announced and not yet taken. Throws RankFailed, and ConfigError if
  /// what comes is another message or there is no memory for it.
  virtual TensorListMessage take() = 0;
};

}  // namespace reef
