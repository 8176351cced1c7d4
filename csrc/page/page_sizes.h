#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "round_up.h"
#include "userfault/frames.h"

namespace reef {

/// How large pages are where addresses stay. An instruction may need several pages at once, so none is more
/// than a small part of the budget: a larger block leaves in chunks, and small ones lie together in slabs.
struct PageSizes {
  static constexpr std::uint64_t kPagesInBudget = 64;
  static constexpr std::uint64_t kMostPagesInBlock = 256;

  std::uint64_t chunk_bytes = std::uint64_t{1} << 20;
  std::uint64_t slab_bytes = std::uint64_t{32} << 10;

  static PageSizes of_budget(std::uint64_t budget_bytes) {
    PageSizes sizes;
    const std::uint64_t part = std::bit_floor(std::max<std::uint64_t>(budget_bytes / kPagesInBudget, 1));
    sizes.chunk_bytes = std::clamp(part, kFrameBytes, sizes.chunk_bytes);
    sizes.slab_bytes = std::min(sizes.chunk_bytes, sizes.slab_bytes);
    return sizes;
  }
  /// Of a block of so many bytes.
  std::uint64_t page_bytes(std::uint64_t block_bytes) const {
    return std::max(chunk_bytes, round_up(block_bytes / kMostPagesInBlock, kFrameBytes));
  }
};

}  // namespace reef
