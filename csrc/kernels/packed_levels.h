#pragma once

#include <cstdint>
#include <vector>

namespace reef::kernels {

/// Floats in a few bits each. Every kLevelBlock of them have one step, and each is a whole number of half
/// steps: (2 code - most) times half a step, with codes from 0 to `most`. Of one bit `most` is 1: a sign. Of
/// more it is 2^bits - 2, an even number, so zero is a level and the levels are those of sign and magnitude.
///
/// A block travels as a float32, half its step, and its codes, packed without gaps; the last block's missing
/// elements are zeros. Where an element of a block is not finite its step is NaN, and so is all of it.
inline constexpr std::int64_t kLevelBlock = 512;

/// Of so many elements, with `bits` from 1 to 8: 4 bytes and 64 times `bits` for each block.
constexpr std::int64_t packed_bytes(std::int64_t elements, int bits) {
  return (elements + kLevelBlock - 1) / kLevelBlock * (4 + kLevelBlock / 8 * bits);
}

/// QSGD (1610.02132, section 3.1) with the block's largest magnitude for its norm: that one is no larger than
/// the 2-norm, so no level is finer. An element becomes one of the two levels next to it, by chance, so that
/// its mean is the element. Its error's variance is at most step^2 / 4, and the step is 1 / (2^(bits-1) - 1)
/// of the largest magnitude, rounded up to 16 significant bits: levels are exact in float32, and what is a
/// level stays what it is. An element beyond the largest level (a step that would be no float32) makes the
/// block NaN.
///
/// `bits` from 2 to 8. `key` chooses the random numbers, of which each element has its own: a function of the
/// key and the element's place, whatever the threads.
void encode_levels(const float* values, std::int64_t elements, int bits, std::uint64_t key,
                   std::uint8_t* packed);

/// Signs with the block's mean magnitude, of one bit: `values` become what that loses of them, 0 in a block
/// that is not finite. Zero is positive.
void encode_signs(float* values, std::int64_t elements, std::uint8_t* packed);

/// to[i] = ((part 0 + part 1) + part 2) + ..., of one part or more.
void sum_of_packed(const std::vector<const std::uint8_t*>& parts, int bits, std::int64_t elements, float* to);

}  // namespace reef::kernels
