#include "shard/shared_memory.h"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <vector>

#include "reef/error.h"
#include "shard/dtypes.h"

namespace reef {
namespace {

using at::Tensor;

// What becomes of a tensor's memory.
enum class Fate : std::uint8_t {
  kStays,
  kRounded,  // frozen, and given 16 bits: together with those that share it
  kMoves,    // into a bucket
};

struct Range {
  bool known;  // addresses; else places in the storage, which has no memory just now
  std::uintptr_t begin, end;
  const std::string* name;
  Fate fate;
};

Range range_of(const std::string& name, const Tensor& tensor, Fate fate) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const auto memory = reinterpret_cast<std::uintptr_t>(storage->_mutable_data_ptr_no_checks().get());
  const std::uintptr_t base = memory != 0 ? memory : reinterpret_cast<std::uintptr_t>(storage);
  std::int64_t last = tensor.storage_offset();
  for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto bytes = static_cast<std::uintptr_t>(tensor.element_size());
  return {memory != 0, base + static_cast<std::uintptr_t>(tensor.storage_offset()) * bytes,
          base + static_cast<std::uintptr_t>(last + 1) * bytes, &name, fate};
}

}  // namespace

void check_memory_is_apart(const Shard::Named& parameters, const Shard::Named& buffers,
                           const ShardOptions& options) {
  std::vector<Range> ranges;
  std::unordered_set<const void*> seen, ignored;
  for (const Tensor& tensor : options.ignored) ignored.insert(tensor.unsafeGetTensorImpl());
  const auto add = [&](const std::string& name, const Tensor& tensor, Fate fate) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) ranges.push_back(range_of(name, tensor, fate));
  };
  for (const auto& [name, tensor] : parameters) {
    Fate fate = Fate::kStays;
    if (tensor.defined() && ignored.count(tensor.unsafeGetTensorImpl()) == 0) {
      const bool rounded =
          dtypes_of(tensor.scalar_type(), options.mixed_precision).parameter != tensor.scalar_type();
      fate = !tensor.requires_grad() ? (rounded ? Fate::kRounded : Fate::kStays)
             : has_parts(options)    ? Fate::kMoves
                                     : Fate::kStays;
    }
    add(name, tensor, fate);
  }
  for (const auto& [name, tensor] : buffers) add(name, tensor, Fate::kStays);

  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return std::tie(a.known, a.begin) < std::tie(b.known, b.begin);
  });
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const Range& a = ranges[i];
    for (std::size_t j = i + 1; j < ranges.size() && ranges[j].known == a.known && ranges[j].begin < a.end;
         ++j) {
      const Range& b = ranges[j];
      if (a.fate == b.fate && a.fate != Fate::kMoves) continue;
      throw ConfigError(
          "reef::shard was given " + *a.name + " and " + *b.name +
          ", which are two tensors in the same memory, and gives at least one of them other memory, "
          "by which they would be apart: make them one parameter under two names (in Python "
          "b.weight = a.weight), or copy one, or shard by stage kReplicate without masters.");
    }
  }
}

}  // namespace reef
