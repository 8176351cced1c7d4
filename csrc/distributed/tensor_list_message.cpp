#include "distributed/tensor_list_message.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <exception>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/members.h"
#include "reef/error.h"

namespace reef {
namespace {

using at::Tensor;
using Words = std::vector<std::int64_t>;

constexpr std::int64_t kMagic = 0x7265656674656e73;
/// The first message is always of the same size: gloo ends the process when a message is longer than the
/// receiver expects. A description that does not fit into it is continued in a second one.
constexpr std::int64_t kFirstWords = 128;
constexpr std::int64_t kWordsBefore = 3;  ///< magic, sequence, words of the description
constexpr std::int64_t kFirstDescription = kFirstWords - kWordsBefore;
constexpr std::int64_t kMostTextBytes = 64 << 10;  // each a word

constexpr std::int64_t kDefined = 1, kRequiresGrad = 2;  // flags of a tensor

Words description_of(const TensorListMessage& message) {
  Words words = {static_cast<std::int64_t>(message.tensors.size())};
  for (std::size_t i = 0; i < message.tensors.size(); ++i) {
    const Tensor& tensor = message.tensors[i];
    const bool requires_grad = i < message.requires_grad.size() && message.requires_grad[i];
    words.push_back((tensor.defined() ? kDefined : 0) | (requires_grad ? kRequiresGrad : 0));
    if (!tensor.defined()) continue;
    words.push_back(static_cast<std::int64_t>(tensor.scalar_type()));
    words.push_back(tensor.dim());
    words.insert(words.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  const std::string text = message.failed.substr(0, kMostTextBytes);
  words.push_back(static_cast<std::int64_t>(text.size()));
  for (const char letter : text) words.push_back(static_cast<unsigned char>(letter));
  return words;
}

/// Reads a description word by word.
class Reader {
 public:
  explicit Reader(const Words& words) : words_(words) {}
  std::int64_t next(std::int64_t most) {
    if (at_ == words_.size() || words_[at_] < 0 || words_[at_] > most) throw std::out_of_range("description");
    return words_[at_++];
  }
  std::string text() {
    std::string text(static_cast<std::size_t>(next(kMostTextBytes)), '\0');
    for (char& letter : text) letter = static_cast<char>(next(255));
    return text;
  }

 private:
  const Words& words_;
  std::size_t at_ = 0;
};

struct Described {
  bool defined = false;
  bool requires_grad = false;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> sizes;

  std::int64_t bytes() const {
    return c10::multiply_integers(sizes) * static_cast<std::int64_t>(c10::elementSize(dtype));
  }
};

std::vector<Described> described_in(Reader& reader) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  std::vector<Described> all(static_cast<std::size_t>(reader.next(1 << 20)));
  for (Described& each : all) {
    const std::int64_t flags = reader.next(kDefined | kRequiresGrad);
    each.defined = (flags & kDefined) != 0;
    each.requires_grad = (flags & kRequiresGrad) != 0;
    if (!each.defined) continue;
    each.dtype =
        static_cast<at::ScalarType>(reader.next(static_cast<std::int64_t>(at::ScalarType::NumOptions) - 1));
    each.sizes.resize(static_cast<std::size_t>(reader.next(64)));
    for (std::int64_t& size : each.sizes) size = reader.next(kMost);
  }
  return all;
}

Tensor bytes_of_words(const Words& words, std::int64_t first, std::int64_t count, std::int64_t size) {
  Tensor bytes = at::zeros({size}, at::kLong);
  std::copy_n(words.begin() + first, count, bytes.mutable_data_ptr<std::int64_t>());
  return bytes.view(at::kByte);
}

}  // namespace

void TensorListMessage::check(const std::string& name) const {
  for (const Tensor& tensor : tensors) {
    if (tensor.defined()) check_message(name, tensor);
  }
}

void send_tensor_list(const MessageRoute& route, const TensorListMessage& message, std::int64_t sequence,
                      int tag) {
  const Words description = description_of(message);
  const auto count = static_cast<std::int64_t>(description.size());
  Words first = {kMagic, sequence, count};
  const std::int64_t inside = std::min(count, kFirstDescription);
  first.insert(first.end(), description.begin(), description.begin() + inside);
  route.run("a message to rank " + std::to_string(route.other), [&] {
    MessageRoute::Works works = {
        route.give(bytes_of_words(first, 0, kWordsBefore + inside, kFirstWords), tag)};
    if (count > inside)
      works.push_back(route.give(bytes_of_words(description, inside, count - inside, count - inside), tag));
    for (const Tensor& tensor : message.tensors) {
      if (!tensor.defined()) continue;
      for_each_message_chunk(static_cast<std::int64_t>(tensor.nbytes()),
                             [&](std::int64_t begin, std::int64_t bytes) {
                               works.push_back(route.give(bytes_of_message(tensor, begin, bytes), tag + 1));
                             });
    }
    route.wait(works);
  });
}

TensorListMessage receive_tensor_list(const MessageRoute& route, std::int64_t sequence, int tag) {
  const std::string name = "a message from rank " + std::to_string(route.other);
  const auto nonsense = [&] {
    return ConfigError(name + " is not the one that was expected, number " + std::to_string(sequence) +
                       ": run the same program, with the same version of Reef, on all ranks.");
  };
  const Tensor first = at::empty({kFirstWords}, at::kLong);
  route.run(name, [&] { route.wait({route.take(first.view(at::kByte), tag)}); });
  const auto* const words = first.const_data_ptr<std::int64_t>();
  if (words[0] != kMagic || words[1] != sequence || words[2] < 0) throw nonsense();
  const std::int64_t count = words[2];
  const std::int64_t inside = std::min(count, kFirstDescription);
  Words description(words + kWordsBefore, words + kWordsBefore + inside);
  if (count > inside) {
    const Tensor rest = at::empty({count - inside}, at::kLong);
    route.run(name, [&] { route.wait({route.take(rest.view(at::kByte), tag)}); });
    const auto* const more = rest.const_data_ptr<std::int64_t>();
    description.insert(description.end(), more, more + (count - inside));
  }

  TensorListMessage message;
  std::vector<Described> described;
  try {
    Reader reader(description);
    described = described_in(reader);
    message.failed = reader.text();
  } catch (const std::out_of_range&) {
    throw nonsense();
  }
  std::exception_ptr no_memory;
  for (const Described& each : described) {
    message.requires_grad.push_back(each.requires_grad);
    Tensor& tensor = message.tensors.emplace_back();
    if (!each.defined) continue;
    try {
      tensor = at::empty(each.sizes, each.dtype);
    } catch (const std::exception&) {
      no_memory = std::current_exception();
    }
    // What there is no memory for is received all the same, a chunk at a time, and dropped.
    const Tensor place =
        tensor.defined() ? tensor : at::empty({std::min(each.bytes(), kMessageChunkBytes)}, at::kByte);
    route.run(name, [&] {
      MessageRoute::Works works;
      for_each_message_chunk(each.bytes(), [&](std::int64_t begin, std::int64_t bytes) {
        works.push_back(route.take(bytes_of_message(place, tensor.defined() ? begin : 0, bytes), tag + 1));
      });
      route.wait(works);
    });
  }
  if (no_memory) std::rethrow_exception(no_memory);
  return message;
}

}  // namespace reef
