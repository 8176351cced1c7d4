#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "reef/chain_profile.h"

namespace reef {

/// A chain as it was measured with an input of these sizes.
struct MeasuredShape {
  std::vector<std::int64_t> sizes;
  const ChainProfile* profile;
};

/// What the chain costs with an input of other sizes, from what it costs with those that were measured, or
/// nullopt if none of them is near, or if they do not have the same stages.
///
/// Bytes are an upper bound wherever they grow with each size like a sum or a maximum of its powers of up to
/// 2, with coefficients that are not negative: what a function of a tensor allocates nearly always does. The
/// bound is the least of
///   - that of a measured shape, times the square of the ratio for each size that is larger than there,
///   - between two measured shapes that differ in one size, what lies on the straight line.
/// Seconds are those of the nearest, by the number of elements; they bound nothing.
std::optional<ChainProfile> priced(const std::vector<MeasuredShape>& measured,
                                   const std::vector<std::int64_t>& sizes);

}  // namespace reef
