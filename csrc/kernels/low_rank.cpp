#include "kernels/low_rank.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/parallel.h"

namespace reef::kernels {
namespace {

double dot(const float* a, const float* b, std::int64_t length) {
  constexpr std::int64_t kLanes = 8;
  std::array<double, kLanes> sums{};
  std::int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane)
      sums[lane] += static_cast<double>(a[i + lane]) * static_cast<double>(b[i + lane]);  // exact
  }
  for (; i < length; ++i) sums[i % kLanes] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// Of the length of a row that is not zero.
void normalize(float* row, std::int64_t length) {
  const double norm = std::sqrt(dot(row, row, length));
  if (norm == 0) return;
  for (std::int64_t i = 0; i < length; ++i) row[i] = static_cast<float>(static_cast<double>(row[i]) / norm);
}

constexpr std::int64_t kColumnsTogether = 512;  // stay in the first cache

void take_low_rank_of_row(float* row, float* rest, const float* left, std::int64_t rows, const float* right,
                          std::int64_t columns, std::int64_t rank, float divisor) {
  alignas(64) std::array<float, kColumnsTogether> sum;
  for (std::int64_t begin = 0; begin < columns; begin += kColumnsTogether) {
    const std::int64_t count = std::min(kColumnsTogether, columns - begin);
    std::fill_n(sum.begin(), count, 0.0F);
    for (std::int64_t k = 0; k < rank; ++k) {
      const float factor = left[k * rows];
      const float* const other = right + k * columns + begin;
      for (std::int64_t i = 0; i < count; ++i) sum[i] += factor * other[i];
    }
    float* const own = row + begin;
    float* const own_rest = rest + begin;
    for (std::int64_t i = 0; i < count; ++i) {
      const float beyond = own[i] - sum[i] / divisor;
      own_rest[i] = std::isfinite(beyond) ? beyond : 0.0F;
      own[i] = sum[i];
    }
  }
}

}  // namespace

// A first pass may leave rounding of a row that was nearly the others'; a second one does not.
void orthonormalize(float* rows, std::int64_t count, std::int64_t length) {
  for (std::int64_t k = 0; k < count; ++k) {
    float* const row = rows + k * length;
    normalize(row, length);
    for (int pass = 0; pass < 2; ++pass) {
      for (std::int64_t before = 0; before < k; ++before) {
        const float* const other = rows + before * length;
        const double share = dot(row, other, length);
        for (std::int64_t i = 0; i < length; ++i)
          row[i] = static_cast<float>(static_cast<double>(row[i]) - share * static_cast<double>(other[i]));
      }
      normalize(row, length);
    }
  }
}

void take_low_rank(float* matrix, float* rest, const float* left, const float* right, std::int64_t rows,
                   std::int64_t columns, std::int64_t rank, int divisor) {
  const std::int64_t grain = std::max<std::int64_t>(1, 16384 / std::max<std::int64_t>(columns, 1));
  parallel_for(0, rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      take_low_rank_of_row(matrix + row * columns, rest + row * columns, left + row, rows, right, columns,
                           rank, static_cast<float>(divisor));
    }
  });
}

}  // namespace reef::kernels
