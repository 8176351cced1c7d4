#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "round_up.h"
#include "userfault/frames.h"

namespace reef {

/// The sizes of pages whose addresses stay. An instruction may need several pages at once, so a page is at
/// most a small part of the budget: a larger block leaves in chunks, and small blocks share slabs. Chunks
/// have large frames if the budget is large enough and at most an eighth of the block is lost by rounding up.
struct PageSizes {
  static constexpr std::uint64_t kPagesInBudget = 32;
  static constexpr std::uint64_t kLargePagesInBudget = 16;
  static constexpr std::uint64_t kMostPagesInBlock = 256;

  std::uint64_t chunk_bytes = std::uint64_t{1} << 20;
  std::uint64_t slab_bytes = std::uint64_t{32} << 10;
  bool large_frames = false;

  /// Returns the sizes for a budget. `has_large_frames` says whether the system has large frames.
  static PageSizes of_budget(std::uint64_t budget_bytes, bool has_large_frames) {
    PageSizes sizes;
    const std::uint64_t part = std::bit_floor(std::max<std::uint64_t>(budget_bytes / kPagesInBudget, 1));
    sizes.chunk_bytes = std::clamp(part, kFrameBytes, sizes.chunk_bytes);
    sizes.slab_bytes = std::min(sizes.chunk_bytes, sizes.slab_bytes);
    sizes.large_frames = has_large_frames && budget_bytes / kLargePagesInBudget >= kLargeFrameBytes;
    return sizes;
  }
  /// Returns the size of the frames of a block.
  std::uint64_t frame_bytes(std::uint64_t block_bytes) const {
    const std::uint64_t lost_bytes = round_up(block_bytes, kLargeFrameBytes) - block_bytes;
    return large_frames && lost_bytes <= block_bytes / 8 ? kLargeFrameBytes : kFrameBytes;
  }
  /// Returns the size of the pages of a block that has frames of this size.
  std::uint64_t page_bytes(std::uint64_t block_bytes, std::uint64_t frame_bytes) const {
    return std::max(frame_bytes == kFrameBytes ? chunk_bytes : frame_bytes,
                    round_up(block_bytes / kMostPagesInBlock, frame_bytes));
  }
};

}  // namespace reef
