#pragma once

#include <cstdint>
#include <vector>

#include "kernels/count_nonfinite.h"

/// float32 that travel as bfloat16 or float16 (`format`): to the nearest, ties to even, as LibTorch's casts
/// round, subnormals as well. What is too large (float16: from 65520 on) becomes an infinity, and a NaN what
/// LibTorch's vectors make of it: 0xFFFF; in float16 a quiet one with its sign and first bits.
namespace reef::kernels {

/// Rounds values[i] + before[i] to `rounded`, and puts into `left` what that takes from the sum: 0, where it
/// would not be finite. Without `before` (nullptr) the values are rounded. One pass; no array overlaps
/// another. Returns whether something that was rounded is not finite now.
bool round_to_sixteen_bits(const float* values, const float* before, std::int64_t elements,
                           FloatFormat format, std::uint16_t* rounded, float* left);

/// to[i] = (((parts[0][i] + parts[1][i]) + parts[2][i]) + ...) / divisor, in float32: the same bits as an
/// operator for each would give. One part or more.
void sum_of_sixteen_bits(const std::vector<const std::uint16_t*>& parts, std::int64_t elements,
                         FloatFormat format, int divisor, float* to);

namespace reference {
/// One element at a time through c10's types. Not part of the library: the tests compile them.
bool round_to_sixteen_bits(const float* values, const float* before, std::int64_t elements,
                           FloatFormat format, std::uint16_t* rounded, float* left);
void sum_of_sixteen_bits(const std::vector<const std::uint16_t*>& parts, std::int64_t elements,
                         FloatFormat format, int divisor, float* to);
}  // namespace reference

}  // namespace reef::kernels
