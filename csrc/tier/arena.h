#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "reef/tier.h"

namespace reef {

/// Where an arena's segments come from.
struct SegmentSource {
  std::function<void*(std::size_t bytes)> allocate;  ///< nullptr: there is none
  std::function<void(void*)> free;
};

struct ArenaOptions {
  std::string name;
  std::uint64_t capacity_bytes = 0;
  std::uint64_t segment_bytes = std::uint64_t{64} << 20;  ///< asked for at once; more for a larger page
};

/// Host memory in segments, for memory that is slow to get: pages lie in it side by side, each of its own
/// size rounded up to 512 bytes. Segments stay until the tier goes.
std::shared_ptr<Tier> arena_tier(const ArenaOptions& options, SegmentSource source);

}  // namespace reef
