#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace reef {

/// What goes before the values of a message, and what the receiver answers. Always of the same size: gloo
/// ends the process when a message is longer than the receiver expects.
struct MessageHeader {
  enum class Kind : std::int64_t { kSend, kReceive, kReceiveInto };
  enum class Answer : std::int64_t { kNone, kTaken, kRefused, kNoMemory };

  Kind kind = Kind::kSend;
  std::int64_t tag = 0;
  at::ScalarType dtype = at::kFloat;  ///< of kReceive: any, as the shape
  std::vector<std::int64_t> sizes;
  Answer answer = Answer::kNone;

  static constexpr std::int64_t kMostDims = 64;
  static constexpr std::int64_t kBytes = 8 * (7 + kMostDims);

  static MessageHeader of(Kind kind, const at::Tensor& tensor, std::int64_t tag);
  static MessageHeader anything(std::int64_t tag);
  std::int64_t payload_bytes() const;
  /// Whether a receive with this header wants what is sent with `sent`.
  bool wants(const MessageHeader& sent) const;
  /// "reef::send of Float [2, 3] with tag 1".
  std::string text() const;

  at::Tensor to_bytes() const;
  /// nullopt: it is no header, or one of another version.
  static std::optional<MessageHeader> from_bytes(const at::Tensor& bytes);
};

}  // namespace reef
