#include "distributed/message_header.h"

#include <ATen/ops/zeros.h>

#include <sstream>
#include <utility>

namespace reef {
namespace {

constexpr std::int64_t kMagic = 0x7265656621686472;
constexpr std::int64_t kVersion = 1;
constexpr std::int64_t kWordsBefore = 7;

}  // namespace

MessageHeader MessageHeader::of(Kind kind, const at::Tensor& tensor, std::int64_t tag) {
  MessageHeader header;
  header.kind = kind;
  header.tag = tag;
  header.dtype = tensor.scalar_type();
  header.sizes = tensor.sizes().vec();
  return header;
}

MessageHeader MessageHeader::anything(std::int64_t tag) {
  MessageHeader header;
  header.kind = Kind::kReceive;
  header.tag = tag;
  return header;
}

std::int64_t MessageHeader::payload_bytes() const {
  return c10::multiply_integers(sizes) * static_cast<std::int64_t>(c10::elementSize(dtype));
}

bool MessageHeader::wants(const MessageHeader& sent) const {
  if (tag != sent.tag) return false;
  return kind == Kind::kReceive || (dtype == sent.dtype && sizes == sent.sizes);
}

std::string MessageHeader::text() const {
  std::ostringstream out;
  out << (kind == Kind::kSend      ? "reef::send"
          : kind == Kind::kReceive ? "reef::receive"
                                   : "reef::receive_into");
  if (kind == Kind::kReceive) {
    out << " of anything";
  } else {
    out << " of " << c10::toString(dtype) << " " << c10::IntArrayRef(sizes);
  }
  out << " with tag " << tag;
  return out.str();
}

at::Tensor MessageHeader::to_bytes() const {
  at::Tensor words = at::zeros({kWordsBefore + kMostDims}, at::kLong);
  auto* word = words.mutable_data_ptr<std::int64_t>();
  *word++ = kMagic;
  *word++ = kVersion;
  *word++ = static_cast<std::int64_t>(kind);
  *word++ = static_cast<std::int64_t>(answer);
  *word++ = tag;
  *word++ = static_cast<std::int64_t>(dtype);
  *word++ = static_cast<std::int64_t>(sizes.size());
  for (const auto size : sizes) *word++ = size;
  return words.view(at::kByte);
}

std::optional<MessageHeader> MessageHeader::from_bytes(const at::Tensor& bytes) {
  const at::Tensor words = bytes.view(at::kLong);
  const auto* word = words.const_data_ptr<std::int64_t>();
  if (word[0] != kMagic || word[1] != kVersion || word[6] < 0 || word[6] > kMostDims) return std::nullopt;
  if (word[5] < 0 || word[5] >= static_cast<std::int64_t>(at::ScalarType::NumOptions)) return std::nullopt;
  MessageHeader header;
  header.kind = static_cast<Kind>(word[2]);
  header.answer = static_cast<Answer>(word[3]);
  header.tag = word[4];
  header.dtype = static_cast<at::ScalarType>(word[5]);
  header.sizes.assign(word + kWordsBefore, word + kWordsBefore + word[6]);
  return header;
}

}  // namespace reef
