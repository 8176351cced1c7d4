#include "kernels/ordered_sum.h"

#include <algorithm>
#include <array>

namespace reef::kernels {

void ordered_sum(const std::vector<const float*>& parts, float* to, std::int64_t elements, int divisor) {
  constexpr std::int64_t kTogether = 2048;  // stay in the first cache
  alignas(64) std::array<float, kTogether> sum;
  const auto count = static_cast<float>(divisor);
  for (std::int64_t begin = 0; begin < elements; begin += kTogether) {
    const std::int64_t here = std::min(kTogether, elements - begin);
    const float* const a = parts[0] + begin;
    const float* const b = parts[1] + begin;
    for (std::int64_t i = 0; i < here; ++i) sum[i] = a[i] + b[i];
    for (std::size_t part = 2; part < parts.size(); ++part) {
      const float* const next = parts[part] + begin;
      for (std::int64_t i = 0; i < here; ++i) sum[i] += next[i];
    }
    if (divisor != 1) {
      for (std::int64_t i = 0; i < here; ++i) to[begin + i] = sum[i] / count;
    } else {
      std::copy_n(sum.data(), here, to + begin);
    }
  }
}

}  // namespace reef::kernels
