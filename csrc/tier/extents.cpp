#include "tier/extents.h"

#include <algorithm>
#include <iterator>

namespace reef {

std::uint64_t Extents::peek(std::uint64_t bytes) const {
  const auto hole =
      std::find_if(holes_.begin(), holes_.end(), [&](const auto& h) { return h.second >= bytes; });
  return hole == holes_.end() ? end_ : hole->first;
}

std::uint64_t Extents::take(std::uint64_t bytes) {
  const std::uint64_t offset = peek(bytes);
  if (offset == end_) {
    end_ += bytes;
    return offset;
  }
  const std::uint64_t rest = holes_.at(offset) - bytes;
  holes_.erase(offset);
  if (rest > 0) holes_.emplace(offset + bytes, rest);
  return offset;
}

void Extents::give_back(std::uint64_t offset, std::uint64_t bytes) {
  auto after = holes_.lower_bound(offset);
  if (after != holes_.end() && offset + bytes == after->first) {
    bytes += after->second;
    after = holes_.erase(after);
  }
  if (after != holes_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      holes_.erase(before);
    }
  }
  if (offset + bytes == end_) {
    end_ = offset;
  } else {
    holes_.emplace(offset, bytes);
  }
}

}  // namespace reef
