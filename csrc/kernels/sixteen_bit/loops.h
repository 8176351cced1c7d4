#pragma once

#include <cstdint>

namespace reef::kernels {

/// The loops over a part of the arrays, on one thread, for one of the two formats.
struct SixteenBitLoops {
  bool (*round)(const float* values, const float* before, std::int64_t elements, std::uint16_t* rounded,
                float* left);
  void (*sum)(const std::uint16_t* const* parts, std::int64_t parts_count, std::int64_t first,
              std::int64_t elements, int divisor, float* to);
};
struct SixteenBitKernels {
  SixteenBitLoops bfloat16, float16;
};
/// Returns nullptr if the processor lacks the instructions.
const SixteenBitKernels* sixteen_bit_kernels_with_avx2();

}  // namespace reef::kernels
