#pragma once

#ifdef __F16C__
#include <immintrin.h>
#endif

#include <cstdint>

#include "kernels/sixteen_bit/loops.h"

/// What sixteen_bit.h says, for whatever instructions the including source is compiled for: the same bits
/// from all. Loops without branches, for the compiler to make lanes of. Nothing here is inline code of the
/// standard library that a linker could share.
namespace reef::kernels {

namespace {

constexpr std::uint32_t kSize = 0x7FFFFFFF;  // all of a float32 but its sign
constexpr std::uint32_t kInfinity = 0x7F800000;

std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
// Without a branch.
std::uint32_t select(bool which, std::uint32_t a, std::uint32_t b) {
  const std::uint32_t mask = 0U - static_cast<std::uint32_t>(which);
  return (a & mask) | (b & ~mask);
}

struct BFloat16Code {
  static constexpr std::uint32_t kInfinite = 0x7F80;
  static std::uint32_t of(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t nearest = (bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U;
    return select((bits & kSize) > kInfinity, 0xFFFFU, nearest);
  }
  static float value(std::uint32_t code) { return float_of(code << 16U); }
};

struct Float16Code {
  static constexpr std::uint32_t kInfinite = 0x7C00;
  static constexpr std::uint32_t kHalf = 0x3F000000;  // 0.5 as a float32, whose last bit is 2^-24
  static std::uint32_t of(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t size = bits & kSize;
    // Below 2^-14 the last bit is 2^-24: the sum rounds as it is to.
    const std::uint32_t small = bits_of(float_of(size) + 0.5F) - kHalf;
    const std::uint32_t nearest = (size + 0xFFFU + ((size >> 13U) & 1U) - 0x38000000U) >> 13U;
    std::uint32_t code = select(size < 0x38800000U, small, nearest);
    code = select(size >= 0x477FF000U, kInfinite, code);
    code = select(size > kInfinity, 0x7E00U | ((size >> 13U) & 0x3FFU), code);
    return code | ((bits >> 16U) & 0x8000U);
  }
  static float value(std::uint32_t code) {
    const std::uint32_t size = code & 0x7FFFU;
    const std::uint32_t small = bits_of(float_of(size | kHalf) - 0.5F);
    const std::uint32_t quiet = select(size > kInfinite, 0x400000U, 0);
    std::uint32_t bits = select(size < 0x400U, small, (size << 13U) + 0x38000000U);
    bits = select(size >= kInfinite, (size << 13U) | kInfinity | quiet, bits);
    return float_of(bits | ((code & 0x8000U) << 16U));
  }
};

template <class Code>
void round_each(const float* __restrict values, std::int64_t count, std::uint16_t* __restrict codes) {
  for (std::int64_t i = 0; i < count; ++i) codes[i] = static_cast<std::uint16_t>(Code::of(values[i]));
}
template <class Code>
void value_each(const std::uint16_t* __restrict codes, std::int64_t count, float* __restrict values) {
  for (std::int64_t i = 0; i < count; ++i) values[i] = Code::value(codes[i]);
}

#ifdef __F16C__
// Uses the processor's own conversions, which no compiler derives from a formula.
template <>
void round_each<Float16Code>(const float* __restrict values, std::int64_t count,
                             std::uint16_t* __restrict codes) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), eight);
  }
  for (; i < count; ++i) codes[i] = static_cast<std::uint16_t>(Float16Code::of(values[i]));
}
template <>
void value_each<Float16Code>(const std::uint16_t* __restrict codes, std::int64_t count,
                             float* __restrict values) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
    _mm256_storeu_ps(values + i, _mm256_cvtph_ps(eight));
  }
  for (; i < count; ++i) values[i] = Float16Code::value(codes[i]);
}
#endif

constexpr std::int64_t kTile = 512;  // stays in the first cache
using Tile = float[kTile];

template <class Code>
bool round_tile(const float* __restrict sums, std::int64_t count, std::uint16_t* __restrict rounded,
                float* __restrict left) {
  alignas(64) Tile arrived;
  round_each<Code>(sums, count, rounded);
  value_each<Code>(rounded, count, arrived);
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const float lost = sums[i] - arrived[i];
    left[i] = float_of(select((bits_of(lost) & kSize) < kInfinity, bits_of(lost), 0));
    const std::uint32_t size = bits_of(arrived[i]) & kSize;
    largest = largest < size ? size : largest;
  }
  return largest >= kInfinity;
}

template <class Code>
bool round(const float* values, const float* before, std::int64_t elements, std::uint16_t* rounded,
           float* left) {
  alignas(64) Tile sums;
  bool nonfinite = false;
  for (std::int64_t begin = 0; begin < elements; begin += kTile) {
    const std::int64_t count = elements - begin < kTile ? elements - begin : kTile;
    const float* const own = values + begin;
    for (std::int64_t i = 0; before != nullptr && i < count; ++i) sums[i] = own[i] + before[begin + i];
    const float* const from = before != nullptr ? sums : own;
    nonfinite = round_tile<Code>(from, count, rounded + begin, left + begin) || nonfinite;
  }
  return nonfinite;
}

template <class Code>
void sum(const std::uint16_t* const* parts, std::int64_t parts_count, std::int64_t first,
         std::int64_t elements, int divisor, float* to) {
  alignas(64) Tile next;
  const auto divided_by = static_cast<float>(divisor);
  const float inverse = 1.0F / divided_by;
  const bool exact = (divisor & (divisor - 1)) == 0;  // the inverse of a power of two: the same bits, faster
  for (std::int64_t begin = first; begin < first + elements; begin += kTile) {
    const std::int64_t rest = first + elements - begin;
    const std::int64_t count = rest < kTile ? rest : kTile;
    float* __restrict const own = to + begin;
    value_each<Code>(parts[0] + begin, count, own);
    for (std::int64_t part = 1; part < parts_count; ++part) {
      value_each<Code>(parts[part] + begin, count, next);
      for (std::int64_t i = 0; i < count; ++i) own[i] += next[i];
    }
    if (divisor == 1) continue;
    if (exact) {
      for (std::int64_t i = 0; i < count; ++i) own[i] *= inverse;
    } else {
      for (std::int64_t i = 0; i < count; ++i) own[i] /= divided_by;
    }
  }
}

template <class Code>
constexpr SixteenBitLoops kLoopsOf = {&round<Code>, &sum<Code>};
constexpr SixteenBitKernels kSixteenBit = {kLoopsOf<BFloat16Code>, kLoopsOf<Float16Code>};

}  // namespace
}  // namespace reef::kernels
