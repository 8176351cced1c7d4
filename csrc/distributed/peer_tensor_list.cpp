#include "distributed/peer_tensor_list.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <exception>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "distributed/members.h"
#include "reef/error.h"

namespace reef {
namespace {

using at::Tensor;
using Words = std::vector<std::int64_t>;

constexpr std::int64_t kPeerMagic = 0x7265656670656572;
constexpr std::int64_t kMostWords = 1 << 24;  // of a description

/// What comes before the description.
struct Before {
  std::int64_t magic, number, words;
};

/// A message as it is sent: Before, the description, and the values of each tensor. Refers to the memory of
/// the message's tensors, which must outlive it.
class OutgoingMessage {
 public:
  OutgoingMessage(std::int64_t number, const TensorListMessage& message) : words_(description_of(message)) {
    words_.insert(words_.begin(), {kPeerMagic, number, static_cast<std::int64_t>(words_.size())});
    add(words_.data(), words_.size() * sizeof(std::int64_t));
    for (const Tensor& tensor : message.tensors) {
      if (tensor.defined()) add(tensor.const_data_ptr(), tensor.nbytes());
    }
  }
  const PeerConnection::Pieces& pieces() const { return pieces_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void add(const void* memory, std::size_t bytes) {
    pieces_.push_back({const_cast<void*>(memory), bytes});  // iovec serves those who read, too
    bytes_ += bytes;
  }

  Words words_;
  PeerConnection::Pieces pieces_;
  std::size_t bytes_ = 0;
};

/// Receives values for which there is no memory, and drops them.
void drop(PeerConnection& connection, std::int64_t bytes) {
  std::array<char, 4096> place{};
  for (std::int64_t left = bytes; left > 0; left -= static_cast<std::int64_t>(place.size()))
    connection.receive(place.data(), std::min(place.size(), static_cast<std::size_t>(left)));
}

}  // namespace

bool PeerTensorListSender::send_at_once(const TensorListMessage& message) {
  if (Heartbeat* const heart = heart_of(route_.group())) {
    try {
      heart->check();
    } catch (const Heartbeat::Silence&) {
      return false;  // send() says so
    }
  }
  const OutgoingMessage outgoing(number_, message);
  sent_ = connection_->send_at_once(outgoing.pieces(), 0);
  if (sent_ < outgoing.bytes()) return false;
  sent_ = 0;
  ++number_;
  return true;
}

void PeerTensorListSender::send(const TensorListMessage& message, std::int64_t /*stream*/) {
  const OutgoingMessage outgoing(number_, message);
  route_.run("a message to rank " + std::to_string(route_.other), [&] {
    route_.wait({c10::make_intrusive<PeerTransfer>(connection_,
                                                   [&] { connection_->send(outgoing.pieces(), sent_); })});
  });
  sent_ = 0;
  ++number_;
}

TensorListMessage PeerTensorListReceiver::take() {
  const std::string name = "a message from rank " + std::to_string(route_.other);
  const std::int64_t number = number_++;
  TensorListMessage message;
  bool is_expected = false;
  std::exception_ptr no_memory;
  const auto receive = [&] {
    Before before{};
    connection_->receive(&before, sizeof before);
    if (before.magic != kPeerMagic || before.number != number || before.words < 0 ||
        before.words > kMostWords)
      return;
    Words words(static_cast<std::size_t>(before.words));
    connection_->receive(words.data(), words.size() * sizeof(std::int64_t));
    std::vector<DescribedTensor> described;
    try {
      std::tie(message, described) = described_by(words);
    } catch (const std::out_of_range&) {
      return;
    }
    is_expected = true;
    for (const DescribedTensor& each : described) {
      Tensor& tensor = message.tensors.emplace_back();
      if (!each.defined) continue;
      try {
        tensor = at::empty(each.sizes, each.dtype);
      } catch (const std::exception&) {
        no_memory = std::current_exception();
        drop(*connection_, each.bytes());
        continue;
      }
      connection_->receive(tensor.mutable_data_ptr(), tensor.nbytes());
    }
  };
  route_.run(name, [&] { route_.wait({c10::make_intrusive<PeerTransfer>(connection_, receive)}); });
  if (!is_expected) throw unexpected_message(name, number);
  if (no_memory) std::rethrow_exception(no_memory);
  return message;
}

}  // namespace reef
