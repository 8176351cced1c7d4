#include "kernels/ordered_sum.h"

#include <algorithm>
#include <array>

namespace reef::kernels {

void ordered_sum(const std::vector<const float*>& parts, float* to, std::int64_t elements, int divisor) {
  constexpr std::int64_t kTogether = 2048;  // stay in the first cache
  alignas(64) std::array<float, kTogether> sum;
  const auto count = static_cast<float>(divisor);
  const float inverse = 1.0F / count;
  const bool exact = (divisor & (divisor - 1)) == 0;  // the inverse of a power of two: the same bits, faster
  for (std::int64_t begin = 0; begin < elements; begin += kTogether) {
    const std::int64_t here = std::min(kTogether, elements - begin);
    const float* before = parts[0] + begin;
    for (std::size_t part = 1; part + 1 < parts.size(); ++part) {
      const float* const next = parts[part] + begin;
      for (std::int64_t i = 0; i < here; ++i) sum[i] = before[i] + next[i];
      before = sum.data();
    }
    const float* const last = parts.back() + begin;
    float* const own = to + begin;
    // Where `own` is one of them, an element depends on itself alone.
    if (exact) {
#pragma GCC ivdep
      for (std::int64_t i = 0; i < here; ++i) own[i] = (before[i] + last[i]) * inverse;
    } else {
#pragma GCC ivdep
      for (std::int64_t i = 0; i < here; ++i) own[i] = (before[i] + last[i]) / count;
    }
  }
}

}  // namespace reef::kernels
