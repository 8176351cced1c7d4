#pragma once

#include <cstdint>

#include "distributed/tensor_list_message.h"

namespace reef {

/// One end of a route on which lists of tensors travel, numbered from 0. Each message is of a stream, of
/// which messages are mostly alike; both ends know which.
class TensorListSender {
 public:
  virtual ~TensorListSender() = default;
  /// Sends the next message if that takes no waiting, on whichever thread; nothing else may be under way.
  /// Returns whether it is sent; otherwise it is the one that send() must be given next.
  virtual bool send_at_once(const TensorListMessage& message) = 0;
  /// Returns when the values may change. Throws RankFailed.
  virtual void send(const TensorListMessage& message, std::int64_t stream) = 0;
};

class TensorListReceiver {
 public:
  virtual ~TensorListReceiver() = default;
  /// Says that the next message will be taken. At most so many messages of a rank may be said and not taken
  /// as MessageRoom says. Throws RankFailed.
  virtual void begin(std::int64_t stream) = 0;
  /// Waits for the first message of which begin() has told. Throws RankFailed, and ConfigError if what comes
  /// is another message or there is no memory for it.
  virtual TensorListMessage take() = 0;
};

}  // namespace reef
