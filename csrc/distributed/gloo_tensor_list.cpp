#include "distributed/gloo_tensor_list.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

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

/// Returns the bytes that a tensor of `bytes` takes among packed ones, each of which begins at a multiple
/// of 64.
constexpr std::int64_t place_bytes(std::int64_t bytes) {
  return static_cast<std::int64_t>(round_up(static_cast<std::uint64_t>(bytes), 64));
}
std::int64_t packed_bytes(const std::vector<std::int64_t>& bytes_of_each) {
  std::int64_t all = 0;
  for (const std::int64_t bytes : bytes_of_each) all += place_bytes(bytes);
  return all;
}
Tensor bytes_of_words(const std::int64_t* words, std::int64_t count) {
  Tensor bytes = at::empty({count}, at::kLong);
  std::copy_n(words, count, bytes.mutable_data_ptr<std::int64_t>());
  return bytes.view(at::kByte);
}

/// Returns the tensor that lies at byte `first` of `packed`, and shares its memory.
Tensor unpacked(const Tensor& packed, std::int64_t first, const DescribedTensor& described) {
  Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(packed.storage()),
                                                           c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                           c10::scalarTypeToTypeMeta(described.dtype));
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(first / static_cast<std::int64_t>(c10::elementSize(described.dtype)));
  impl->set_sizes_contiguous(described.sizes);
  return tensor;
}

}  // namespace

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

void GlooTensorListSender::send(const TensorListMessage& message, std::int64_t stream) {
  const Words description = description_of(message);
  const auto count = static_cast<std::int64_t>(description.size());
  const std::int64_t inside = std::min(count, kFirstDescription);
  const std::vector<std::int64_t> sizes = value_bytes(message.tensors);
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

void GlooTensorListReceiver::begin(std::int64_t stream) {
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

TensorListMessage GlooTensorListReceiver::take() {
  const std::string name = "a message from rank " + std::to_string(route_.other);
  const std::int64_t number = taken_++;
  Coming coming = std::move(coming_.front());
  coming_.pop_front();
  route_.run(name, [&] { route_.wait({coming.work}); });
  const auto* const words = static_cast<const std::int64_t*>(coming.first.const_data_ptr());
  if (words[0] != kMagic || words[1] != number || words[2] < 0) throw unexpected_message(name, number);
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

  std::pair<TensorListMessage, std::vector<DescribedTensor>> found;
  try {
    found = described_by(description);
  } catch (const std::out_of_range&) {
    throw unexpected_message(name, number);
  }
  auto& [message, described] = found;
  std::vector<std::int64_t> sizes;
  for (const DescribedTensor& each : described) sizes.push_back(each.bytes());
  const std::int64_t bytes = packed_bytes(sizes);
  if (packed && kFirstBytes + bytes > coming.first.numel()) throw unexpected_message(name, number);
  std::int64_t at = kFirstBytes;
  for (std::size_t i = 0; i < described.size(); ++i) {
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
  return std::move(message);
}

}  // namespace reef
