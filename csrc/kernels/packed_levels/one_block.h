#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/packed_levels.h"
#include "kernels/packed_levels/blocks.h"

/// What packed_levels.h says of blocks, for whatever instructions the including source is compiled for: the
/// same bits from all. Nothing here is inline code of the standard library that a linker could share.
namespace reef::kernels {

namespace {

using Values = float[kLevelBlock];
using Codes = std::uint8_t[kLevelBlock];

// Codes as planes of 4, 2 and 1 bits, of which a byte has as many as fit: element j of each part of the
// block, so that neighbours stay neighbours.
template <int kWidth>
void pack_plane(const Codes& codes, int shift, std::uint8_t* plane) {
  constexpr int kParts = 8 / kWidth;
  constexpr int kBytes = static_cast<int>(kLevelBlock) / kParts;
  constexpr unsigned kMask = (1U << kWidth) - 1;
  for (int j = 0; j < kBytes; ++j) {
    unsigned byte = 0;
    for (int part = 0; part < kParts; ++part)
      byte |= ((static_cast<unsigned>(codes[j + part * kBytes]) >> shift) & kMask) << (part * kWidth);
    plane[j] = static_cast<std::uint8_t>(byte);
  }
}
template <int kWidth>
void unpack_plane(const std::uint8_t* plane, int shift, Codes& codes) {
  constexpr int kParts = 8 / kWidth;
  constexpr int kBytes = static_cast<int>(kLevelBlock) / kParts;
  constexpr unsigned kMask = (1U << kWidth) - 1;
  for (int part = 0; part < kParts; ++part) {
    for (int j = 0; j < kBytes; ++j) {
      const unsigned field = (static_cast<unsigned>(plane[j]) >> (part * kWidth)) & kMask;
      codes[j + part * kBytes] = static_cast<std::uint8_t>(codes[j + part * kBytes] | (field << shift));
    }
  }
}

void pack(const Codes& codes, int bits, std::uint8_t* to) {
  if (bits == 8) {
    std::memcpy(to, codes, sizeof(Codes));
    return;
  }
  int shift = 0;
  if ((bits & 4) != 0) {
    pack_plane<4>(codes, shift, to);
    to += kLevelBlock / 2;
    shift += 4;
  }
  if ((bits & 2) != 0) {
    pack_plane<2>(codes, shift, to);
    to += kLevelBlock / 4;
    shift += 2;
  }
  if ((bits & 1) != 0) pack_plane<1>(codes, shift, to);
}

void unpack(const std::uint8_t* from, int bits, Codes& codes) {
  if (bits == 8) {
    std::memcpy(codes, from, sizeof(Codes));
    return;
  }
  std::memset(codes, 0, sizeof(Codes));
  int shift = 0;
  if ((bits & 4) != 0) {
    unpack_plane<4>(from, shift, codes);
    from += kLevelBlock / 2;
    shift += 4;
  }
  if ((bits & 2) != 0) {
    unpack_plane<2>(from, shift, codes);
    from += kLevelBlock / 4;
    shift += 2;
  }
  if ((bits & 1) != 0) unpack_plane<1>(from, shift, codes);
}

bool is_finite(float value) {
  return (__builtin_bit_cast(std::uint32_t, value) & 0x7F800000U) != 0x7F800000U;
}

// The largest magnitude, as bits: NaN above infinity.
std::int32_t largest_magnitude(const Values& values) {
  std::int32_t largest = 0;
  for (const float value : values) {
    const auto bits = static_cast<std::int32_t>(__builtin_bit_cast(std::uint32_t, value) & 0x7FFFFFFFU);
    largest = largest < bits ? bits : largest;
  }
  return largest;
}

// At least largest / levels, with 16 significant bits; NaN, if the largest level is no float32.
float step_of(std::int32_t largest_bits, int levels) {
  const auto largest = __builtin_bit_cast(float, largest_bits);
  if (!is_finite(largest)) return __builtin_nanf("");
  const double exact = static_cast<double>(largest) / levels;
  auto bits = __builtin_bit_cast(std::uint32_t, static_cast<float>(exact));
  if (static_cast<double>(static_cast<float>(exact)) < exact) ++bits;  // the next float above
  const auto step = __builtin_bit_cast(float, (bits + 0xFFU) & ~std::uint32_t{0xFF});
  return is_finite(step * static_cast<float>(levels)) ? step : __builtin_nanf("");
}

// One of the levels next to each value, the one above with the probability that makes the mean right. The
// quotient's fraction and the random number are exact in float32.
void choose_levels(const Values& values, float step, int levels, std::uint64_t key, Codes& codes) {
  const auto low = static_cast<std::uint32_t>(key);
  const auto high = static_cast<std::uint32_t>(key >> 32U);
  for (std::uint32_t i = 0; i < kLevelBlock; ++i) {
    std::uint32_t random = i + low;
    random = (random ^ (random >> 16U)) * 0x7FEB352DU;
    random = ((random ^ (random >> 15U)) + high) * 0x846CA68BU;
    random ^= random >> 16U;
    const float chance = static_cast<float>(static_cast<std::int32_t>(random >> 8U)) * 0x1p-24F;
    const float steps = __builtin_fabsf(values[i]) / step;
    const auto below = static_cast<std::int32_t>(steps);
    const std::int32_t level = below + (chance < steps - static_cast<float>(below) ? 1 : 0);
    codes[i] = static_cast<std::uint8_t>(levels + (values[i] < 0 ? -level : level));
  }
}

// Of `count` elements from `values` on, and zeros.
void fill(Values& block, const float* values, std::int64_t count) {
  std::memcpy(block, values, static_cast<std::size_t>(count) * sizeof(float));
  std::memset(block + count, 0, static_cast<std::size_t>(kLevelBlock - count) * sizeof(float));
}

void put_half_step(std::uint8_t* packed, float half) { std::memcpy(packed, &half, sizeof half); }

void encode_levels_of_block(const float* values, std::int64_t count, int bits, std::uint64_t key,
                            std::uint8_t* packed) {
  alignas(64) Values block;
  alignas(64) Codes codes;
  const int levels = (1 << (bits - 1)) - 1;
  fill(block, values, count);
  const float step = step_of(largest_magnitude(block), levels);
  if (step > 0) {
    choose_levels(block, step, levels, key, codes);
  } else {
    std::memset(codes, levels, sizeof(Codes));
  }
  put_half_step(packed, step / 2);
  pack(codes, bits, packed + sizeof(float));
}

// Added up in double, in lanes of their own: alike for all instructions.
float mean_magnitude(const Values& block, std::int64_t count) {
  constexpr int kLanes = 8;
  double sums[kLanes] = {};
  for (std::int64_t i = 0; i < kLevelBlock; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane)
      sums[lane] += static_cast<double>(__builtin_fabsf(block[i + lane]));
  }
  const double sum =
      ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  return static_cast<float>(sum / static_cast<double>(count));
}

void encode_signs_of_block(float* values, std::int64_t count, std::uint8_t* packed) {
  alignas(64) Values block;
  alignas(64) Codes codes;
  fill(block, values, count);
  float mean = mean_magnitude(block, count);
  const bool finite = is_finite(mean);
  if (!finite) mean = __builtin_nanf("");
  for (std::int64_t i = 0; i < kLevelBlock; ++i) codes[i] = block[i] < 0 ? 0 : 1;
  for (std::int64_t i = 0; i < kLevelBlock; ++i) {
    const float lost = block[i] - (block[i] < 0 ? -mean : mean);
    block[i] = finite ? lost : 0.0F;
  }
  std::memcpy(values, block, static_cast<std::size_t>(count) * sizeof(float));
  put_half_step(packed, mean);
  pack(codes, 1, packed + sizeof(float));
}

// What is between two levels or signs is exact, so every sum is rounded once.
void add_block(const std::uint8_t* packed, int bits, bool first, Values& sum) {
  alignas(64) Codes codes;
  float half = 0;
  std::memcpy(&half, packed, sizeof half);
  unpack(packed + sizeof half, bits, codes);
  const std::int32_t most = bits == 1 ? 1 : (1 << bits) - 2;
  if (first) {
    for (std::int64_t i = 0; i < kLevelBlock; ++i) sum[i] = static_cast<float>(2 * codes[i] - most) * half;
  } else {
    for (std::int64_t i = 0; i < kLevelBlock; ++i) sum[i] += static_cast<float>(2 * codes[i] - most) * half;
  }
}

void sum_block(const std::uint8_t* const* parts, std::int64_t count_of_parts, int bits, std::int64_t count,
               float* to) {
  alignas(64) Values sum;
  for (std::int64_t part = 0; part < count_of_parts; ++part) add_block(parts[part], bits, part == 0, sum);
  std::memcpy(to, sum, static_cast<std::size_t>(count) * sizeof(float));
}

void unpack_block(const std::uint8_t* packed, int bits, std::uint8_t* to) {
  alignas(64) Codes codes;
  unpack(packed, bits, codes);
  std::memcpy(to, codes, sizeof codes);
}

void pack_block(const std::uint8_t* from, int bits, std::uint8_t* packed) {
  alignas(64) Codes codes;
  std::memcpy(codes, from, sizeof codes);
  pack(codes, bits, packed);
}

constexpr PackedBlocks kBlocks = {&encode_levels_of_block, &encode_signs_of_block, &sum_block, &unpack_block,
                                  &pack_block};

}  // namespace
}  // namespace reef::kernels
