#pragma once

#include <cstdint>

#include "kernels/count_nonfinite.h"
#include "kernels/exact_sum.h"

namespace reef::kernels {

/// Of squares that are added up in double, in one order, this many at a time; these sums are added up
/// exactly. So the whole is the same for any number of threads, and for a tensor in parts if a part begins
/// where one of them does.
inline constexpr std::int64_t kSquaresTogether = 256;

ExactSum sum_of_squares(const void* data, std::int64_t elements, FloatFormat format);

}  // namespace reef::kernels
