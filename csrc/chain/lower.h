#pragma once

#include <cstddef>

namespace reef {

/// best[i] becomes the least of itself and (seconds + behind[i]) + before[i]. All of the dynamic program's
/// time is spent here.
using Lower = void (*)(double* best, std::size_t count, double seconds, const double* behind,
                       const double* before);

/// A copy for each source, which may be compiled for another processor.
[[maybe_unused]] static void lower_with(double* __restrict__ best, std::size_t count, double seconds,
                                        const double* __restrict__ behind,
                                        const double* __restrict__ before) {
  for (std::size_t i = 0; i < count; ++i) {
    const double cost = seconds + behind[i] + before[i];
    best[i] = cost < best[i] ? cost : best[i];
  }
}

/// The same bits, twice as fast; nullptr where the processor cannot. (Twins: lower_avx2.cpp,
/// no_lower_avx2.cpp.)
Lower lower_with_avx2();

}  // namespace reef
