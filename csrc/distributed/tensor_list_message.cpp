#include "distributed/tensor_list_message.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/members.h"
#include "reef/error.h"
#include "round_up.h"

namespace reef {
namespace {

using at::Tensor;
using Words = std::vector<std::int64_t>;

constexpr std::int64_t kMagic = 0x7265656674656e73;
/// What precedes the values is always of the same size: gloo ends the process when a message is longer than
/// the receiver expects (a shorter one is received). A description that does not fit is continued in a second
/// one.
constexpr std::int64_t kFirstWords = 128;
constexpr std::int64_t kFirstBytes = 8 * kFirstWords;
constexpr std::int64_t kWordsBefore = 4;  ///< magic, number, words of the description, whether values follow
constexpr std::int64_t kFirstDescription = kFirstWords - kWordsBefore;
constexpr std::int64_t kMostTextBytes = 64 << 10;  // each a word

constexpr std::int64_t kDefined = 1, kRequiresGrad = 2, kLaidOut = 4;  // flags of a tensor

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
  TensorLayout layout;

  std::int64_t bytes() const {
    return c10::multiply_integers(sizes) * static_cast<std::int64_t>(c10::elementSize(dtype));
  }
};

std::vector<Described> described_in(Reader& reader) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  std::vector<Described> all(static_cast<std::size_t>(reader.next(1 << 20)));
  for (Described& each : all) {
    const std::int64_t flags = reader.next(kDefined | kRequiresGrad | kLaidOut);
    each.defined = (flags & kDefined) != 0;
    each.requires_grad = (flags & kRequiresGrad) != 0;
    if (!each.defined) continue;
    each.dtype =
        static_cast<at::ScalarType>(reader.next(static_cast<std::int64_t>(at::ScalarType::NumOptions) - 1));
    each.sizes.resize(static_cast<std::size_t>(reader.next(64)));
    for (std::int64_t& size : each.sizes) size = reader.next(kMost);
    if ((flags & kLaidOut) == 0) continue;
    each.layout.strides.resize(each.sizes.size());
    for (std::int64_t& stride : each.layout.strides) stride = reader.next(kMost);
    each.layout.misaligned_elements = reader.next(TensorLayout::kAlignment);
  }
  return all;
}

/// Returns how many bytes a tensor of so many takes where several are packed: each begins at a multiple
/// of 64.
constexpr std::int64_t place_bytes(std::int64_t bytes) {
  return static_cast<std::int64_t>(round_up(static_cast<std::uint64_t>(bytes), 64));
}
std::int64_t packed_bytes(const std::vector<std::int64_t>& bytes_of_each) {
  std::int64_t all = 0;
  for (const std::int64_t bytes : bytes_of_each) all += place_bytes(bytes);
  return all;
}
std::vector<std::int64_t> bytes_of_each(const std::vector<Tensor>& tensors) {
  std::vector<std::int64_t> bytes;
  for (const Tensor& tensor : tensors)
    bytes.push_back(tensor.defined() ? static_cast<std::int64_t>(tensor.nbytes()) : 0);
  return bytes;
}
std::vector<std::int64_t> bytes_of_each(const std::vector<Described>& described) {
  std::vector<std::int64_t> bytes;
  for (const Described& each : described) bytes.push_back(each.defined ? each.bytes() : 0);
  return bytes;
}

Tensor bytes_of_words(const std::int64_t* words, std::int64_t count) {
  Tensor bytes = at::empty({count}, at::kLong);
  std::copy_n(words, count, bytes.mutable_data_ptr<std::int64_t>());
  return bytes.view(at::kByte);
}

/// Returns the tensor that lies at byte `first` of `packed`, and shares its memory.
Tensor unpacked(const Tensor& packed, std::int64_t first, const Described& described) {
  Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(packed.storage()),
                                                           c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                           c10::scalarTypeToTypeMeta(described.dtype));
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(first / static_cast<std::int64_t>(c10::elementSize(described.dtype)));
  impl->set_sizes_contiguous(described.sizes);
  return tensor;
}

}  // namespace

void TensorListMessage::check(const std::string& name) const {
  for (const Tensor& tensor : tensors) {
    if (tensor.defined()) check_message(name, tensor);
  }
}

std::int64_t MessageRoom::bytes(std::int64_t number, std::int64_t stream) const {
  const auto noted = noted_.find(stream);
  if (noted == noted_.end()) return 0;
  std::int64_t bytes = 0;
  for (const Noted& each : noted->second) {
    if (each.number <= number - kAhead) bytes = each.bytes;
  }
  return bytes;
}

void MessageRoom::note(std::int64_t number, std::int64_t stream, std::int64_t bytes) {
  std::deque<Noted>& noted = noted_[stream];
  noted.push_back({number, bytes <= kMessageChunkBytes ? bytes : 0});
  while (noted.size() > kAhead + 1) noted.pop_front();
}

void TensorListSender::send(const TensorListMessage& message, std::int64_t stream) {
  const Words description = description_of(message);
  const auto count = static_cast<std::int64_t>(description.size());
  const std::int64_t inside = std::min(count, kFirstDescription);
  const std::vector<std::int64_t> sizes = bytes_of_each(message.tensors);
  const std::int64_t bytes = packed_bytes(sizes);
  const bool packs = bytes > 0 && bytes <= room_.bytes(number_, stream);
  const Tensor first = at::empty({kFirstBytes + (packs ? bytes : 0)}, at::kByte);
  auto* const memory = static_cast<char*>(first.mutable_data_ptr());
  auto* const words = reinterpret_cast<std::int64_t*>(memory);
  std::fill_n(words, kFirstWords, 0);
  words[0] = kMagic;
  words[1] = number_;
  words[2] = count;
  words[3] = packs ? 1 : 0;
  std::copy_n(description.begin(), inside, words + kWordsBefore);
  std::int64_t at = kFirstBytes;
  for (std::size_t i = 0; packs && i < sizes.size(); ++i) {
    if (sizes[i] > 0)
      std::memcpy(memory + at, message.tensors[i].const_data_ptr(), static_cast<std::size_t>(sizes[i]));
    at += place_bytes(sizes[i]);
  }
  route_.run("a message to rank " + std::to_string(route_.other), [&] {
    MessageRoute::Works works = {route_.give(first, tag_)};
    if (count > inside) {
      const Tensor rest = bytes_of_words(description.data() + inside, count - inside);
      works.push_back(route_.give(rest, tag_ + 1));
    }
    for (std::size_t i = 0; !packs && i < sizes.size(); ++i) {
      for_each_message_chunk(sizes[i], [&](std::int64_t begin, std::int64_t chunk) {
        works.push_back(route_.give(bytes_of_message(message.tensors[i], begin, chunk), tag_ + 1));
      });
    }
    route_.wait(works);
  });
  room_.note(number_++, stream, bytes);
}

void TensorListReceiver::begin(std::int64_t stream) {
  const std::int64_t size = kFirstBytes + room_.bytes(begun_++, stream);
  Coming coming{stream, {}, {}, {}};
  try {
    coming.first = at::empty({size}, at::kByte);
  } catch (const std::exception&) {
    // The sender counts on this room all the same. What comes is dropped.
    coming.no_memory = std::current_exception();
    coming.first = at::from_blob(
        new char[static_cast<std::size_t>(size)], {size},
        [](void* memory) { delete[] static_cast<char*>(memory); }, at::kByte);
  }
  route_.run("a message from rank " + std::to_string(route_.other),
             [&] { coming.work = route_.take(coming.first, tag_); });
  coming_.push_back(std::move(coming));
}

TensorListMessage TensorListReceiver::take() {
  const std::string name = "a message from rank " + std::to_string(route_.other);
  const std::int64_t number = taken_++;
  const auto nonsense = [&] {
    return ConfigError(name + " is not the one that was expected, number " + std::to_string(number) +
                       ": run the same program, with the same version of Reef, on all ranks.");
  };
  Coming coming = std::move(coming_.front());
  coming_.pop_front();
  route_.run(name, [&] { route_.wait({coming.work}); });
  const auto* const words = static_cast<const std::int64_t*>(coming.first.const_data_ptr());
  if (words[0] != kMagic || words[1] != number || words[2] < 0) throw nonsense();
  const std::int64_t count = words[2];
  const bool packed = words[3] != 0;
  const std::int64_t inside = std::min(count, kFirstDescription);
  Words description(words + kWordsBefore, words + kWordsBefore + inside);
  if (count > inside) {
    const Tensor rest = at::empty({count - inside}, at::kLong);
    route_.run(name, [&] { route_.wait({route_.take(rest.view(at::kByte), tag_ + 1)}); });
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
  const std::vector<std::int64_t> sizes = bytes_of_each(described);
  const std::int64_t bytes = packed_bytes(sizes);
  if (packed && kFirstBytes + bytes > coming.first.numel()) throw nonsense();
  std::int64_t at = kFirstBytes;
  for (std::size_t i = 0; i < described.size(); ++i) {
    message.requires_grad.push_back(described[i].requires_grad);
    message.layouts.push_back(described[i].layout);
    Tensor& tensor = message.tensors.emplace_back();
    if (!described[i].defined) continue;
    if (packed) {
      tensor = unpacked(coming.first, at, described[i]);
      at += place_bytes(sizes[i]);
      continue;
    }
    try {
      tensor = at::empty(described[i].sizes, described[i].dtype);
    } catch (const std::exception&) {
      coming.no_memory = std::current_exception();
    }
    // What there is no memory for is received all the same, a chunk at a time, and dropped.
    const Tensor place =
        tensor.defined() ? tensor : at::empty({std::min(sizes[i], kMessageChunkBytes)}, at::kByte);
    route_.run(name, [&] {
      MessageRoute::Works works;
      for_each_message_chunk(sizes[i], [&](std::int64_t begin, std::int64_t chunk) {
        works.push_back(route_.take(bytes_of_message(place, tensor.defined() ? begin : 0, chunk), tag_ + 1));
      });
      route_.wait(works);
    });
  }
  room_.note(number, coming.stream, bytes);
  if (coming.no_memory) std::rethrow_exception(coming.no_memory);
  return message;
}

}  // namespace reef
