#include "distributed/tensor_list_message.h"

#include <stdexcept>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/message_route.h"

namespace reef {
namespace {

using at::Tensor;
using Words = std::vector<std::int64_t>;

constexpr std::int64_t kMostTextBytes = 64 << 10;  // each a word

constexpr std::int64_t kDefined = 1, kRequiresGrad = 2, kLaidOut = 4;  // flags of a tensor

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

DescribedTensor next_tensor(Reader& reader) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  DescribedTensor tensor;
  const std::int64_t flags = reader.next(kDefined | kRequiresGrad | kLaidOut);
  tensor.defined = (flags & kDefined) != 0;
  tensor.requires_grad = (flags & kRequiresGrad) != 0;
  if (!tensor.defined) return tensor;
  tensor.dtype =
      static_cast<at::ScalarType>(reader.next(static_cast<std::int64_t>(at::ScalarType::NumOptions) - 1));
  tensor.sizes.resize(static_cast<std::size_t>(reader.next(64)));
  for (std::int64_t& size : tensor.sizes) size = reader.next(kMost);
  if ((flags & kLaidOut) == 0) return tensor;
  tensor.layout.strides.resize(tensor.sizes.size());
  for (std::int64_t& stride : tensor.layout.strides) stride = reader.next(kMost);
  tensor.layout.misaligned_elements = reader.next(TensorLayout::kAlignment);
  return tensor;
}

}  // namespace

void TensorListMessage::check(const std::string& name) const {
  for (const Tensor& tensor : tensors) {
    if (tensor.defined()) check_message(name, tensor);
  }
}

std::int64_t DescribedTensor::bytes() const {
  return defined ? c10::multiply_integers(sizes) * static_cast<std::int64_t>(c10::elementSize(dtype)) : 0;
}

Words description_of(const TensorListMessage& message) {
  Words words = {static_cast<std::int64_t>(message.tensors.size())};
  for (std::size_t i = 0; i < message.tensors.size(); ++i) {
    const Tensor& tensor = message.tensors[i];
    const bool requires_grad = i < message.requires_grad.size() && message.requires_grad[i];
    const bool laid_out = i < message.layouts.size() && !message.layouts[i].strides.empty();
    words.push_back((tensor.defined() ? kDefined : 0) | (requires_grad ? kRequiresGrad : 0) |
                    (laid_out ? kLaidOut : 0));
    if (!tensor.defined()) continue;
    words.push_back(static_cast<std::int64_t>(tensor.scalar_type()));
    words.push_back(tensor.dim());
    words.insert(words.end(), tensor.sizes().begin(), tensor.sizes().end());
    if (!laid_out) continue;
    const TensorLayout& layout = message.layouts[i];
    words.insert(words.end(), layout.strides.begin(), layout.strides.end());
    words.push_back(layout.misaligned_elements);
  }
  const std::string text = message.failed.substr(0, kMostTextBytes);
  words.push_back(static_cast<std::int64_t>(text.size()));
  for (const char letter : text) words.push_back(static_cast<unsigned char>(letter));
  return words;
}

std::pair<TensorListMessage, std::vector<DescribedTensor>> described_by(const Words& words) {
  Reader reader(words);
  std::pair<TensorListMessage, std::vector<DescribedTensor>> found;
  auto& [message, tensors] = found;
  for (std::int64_t left = reader.next(1 << 20); left > 0; --left) {
    const DescribedTensor& tensor = tensors.emplace_back(next_tensor(reader));
    message.requires_grad.push_back(tensor.requires_grad);
    message.layouts.push_back(tensor.layout);
  }
  message.failed = reader.text();
  return found;
}

ConfigError unexpected_message(const std::string& name, std::int64_t number) {
  return ConfigError(name + " is not the one that was expected, number " + std::to_string(number) +
                     ": run the same program, with the same version of Reef, on all ranks.");
}

std::vector<std::int64_t> value_bytes(const std::vector<Tensor>& tensors) {
  std::vector<std::int64_t> bytes;
  for (const Tensor& tensor : tensors)
    bytes.push_back(tensor.defined() ? static_cast<std::int64_t>(tensor.nbytes()) : 0);
  return bytes;
}

}  // namespace reef
