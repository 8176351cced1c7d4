#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>

namespace reef {

/// Pure: which parameters PowerSGD sends as two factors of a low rank.

/// A tensor's first dimension, and all others in one; 0 x 0 where there is no second, or nothing.
struct MatrixSizes {
  std::int64_t rows = 0, columns = 0;
};

inline MatrixSizes matrix_sizes(std::span<const std::int64_t> shape) {
  if (shape.size() < 2 || shape[0] == 0) return {};
  return {shape[0],
          std::accumulate(shape.begin() + 1, shape.end(), std::int64_t{1}, std::multiplies<std::int64_t>())};
}

/// The rank of its factors, at most `wanted`. 0: factors would not be less than half of the matrix, which is
/// sent as it is.
inline std::int64_t factor_rank(MatrixSizes sizes, std::int64_t wanted) {
  const std::int64_t rank = std::min({wanted, sizes.rows, sizes.columns});
  return 2 * (sizes.rows + sizes.columns) * rank < sizes.rows * sizes.columns ? rank : 0;
}

/// Where the options name none.
inline constexpr std::int64_t kFactorRank = 4;

}  // namespace reef
