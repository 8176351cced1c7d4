#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/lane.h"
#include "kernels/optim_step.h"

/// How numbers of 16 bits are read and written, to the nearest or by chance, and what may be kept of what
/// their rounding loses: formulas for any lanes.
namespace reef::kernels {

/// MurmurHash3's finalizer.
REEF_LANE std::uint32_t mixed(std::uint32_t x) {
  x = (x ^ x >> 16) * 0x85EBCA6BU;
  x = (x ^ x >> 13) * 0xC2B2AE35U;
  return x ^ x >> 16;
}
/// Tile number n of a tensor has the key of tile 0 in a tensor whose key is so many times n more.
inline constexpr std::uint32_t kTileKey = 0x9E3779B1U;
/// Of what is rounded by chance in a step of a tensor, the part of another that begins with this element: its
/// tiles have the keys that they have in the whole.
REEF_LANE std::uint32_t key_of_tensor(std::int64_t step, std::int64_t first) {
  return mixed(static_cast<std::uint32_t>(step)) +
         static_cast<std::uint32_t>(first / kTileElements) * kTileKey;
}
/// In a tile; and there, of state number `slot`.
REEF_LANE std::uint32_t key_of(std::uint32_t tensor_key, std::int64_t tile) {
  return mixed(tensor_key + static_cast<std::uint32_t>(tile) * kTileKey);
}
REEF_LANE std::uint32_t key_of_state(std::uint32_t tile_key, int slot) {
  return mixed(tile_key + static_cast<std::uint32_t>(slot) + 1);
}

/// Where values are encoded that no step has made.
REEF_LANE std::uint32_t key_of_encoded(const OptimState& state, std::int64_t tile) {
  return static_cast<std::uint32_t>(state.first / kTileElements + tile);
}

/// Thirty-two bits for each lane, from the tile, the lane and a key: every rank and every run draws the same.
template <class L>
REEF_LANE typename L::Ints random_bits(std::uint32_t key, int i) {
  using I = typename L::Ints;
  const auto all = [](std::uint32_t x) { return L::all(static_cast<std::int32_t>(x)); };
  constexpr std::uint32_t kSpread = 0x9E3779B1U;
  // Of the sum of lane, element and key: the lane's part is the same everywhere, the others' is one number.
  I x = L::index() * all(kSpread) + all((static_cast<std::uint32_t>(i) + key) * kSpread);
  x = (x ^ shift_right<16>(x)) * all(0x85EBCA6BU);  // as mixed()
  x = (x ^ shift_right<13>(x)) * all(0xC2B2AE35U);
  return x ^ shift_right<16>(x);
}

/// Of their low sixteen: from 0 to below 1.
template <class L>
REEF_LANE typename L::Floats chance(typename L::Ints random) {
  return to_floats(random & L::all(0xFFFF)) * L::all(1.0F / 65536);
}

/// To the nearest, ties to even. Not for NaN.
template <class L>
REEF_LANE typename L::Ints to_bfloat16(typename L::Floats x) {
  const auto bits = bits_of(x);
  return shift_right<16>(bits + L::all(0x7FFF) + (shift_right<16>(bits) & L::all(1)));
}

/// x as bfloat16, up or down by chance so that its mean is x. Not for NaN.
template <class L>
REEF_LANE typename L::Ints to_bfloat16_stochastic(typename L::Floats x, typename L::Ints random) {
  // At the end of the range a carry would make an infinity.
  const auto bits = bits_of(min(max(x, L::all(-0x1.FEp127F)), L::all(0x1.FEp127F)));
  return shift_right<16>(bits + (random & L::all(0xFFFF)));
}

template <class L>
REEF_LANE typename L::Floats load_as_float(OptimDtype dtype, const std::byte* from, int i) {
  if (dtype == OptimDtype::kFloat32) return L::load(reinterpret_cast<const float*>(from) + i);
  const auto* const halves = reinterpret_cast<const std::uint16_t*>(from) + i;
  if (dtype == OptimDtype::kFloat16) return L::load_float16(halves);
  return floats_of_bits(shift_left<16>(L::load_halves(halves)));
}

template <class L>
REEF_LANE void store_rounded(OptimDtype dtype, std::byte* to, int i, typename L::Floats x) {
  if (dtype == OptimDtype::kFloat32) return L::store(reinterpret_cast<float*>(to) + i, x);
  auto* const halves = reinterpret_cast<std::uint16_t*>(to) + i;
  if (dtype == OptimDtype::kFloat16) return L::store_float16(halves, x);
  L::store_halves(halves, to_bfloat16<L>(x));
}

/// Half a unit in the last place of a 16-bit number given as float32, of its normal numbers' smallest below
/// them.
template <class L>
REEF_LANE typename L::Floats half_unit(OptimDtype dtype, typename L::Floats x) {
  const bool brain = dtype == OptimDtype::kBFloat16;
  const int digits = brain ? 8 : 11;                // with the hidden one
  const int least = brain ? digits + 1 : 127 - 14;  // biased exponent whose half unit is still a normal float
  const auto exponent = max(shift_right<23>(bits_of(abs(x))), L::all(least));
  return floats_of_bits(shift_left<23>(exponent - L::all(digits)));
}

/// The float16 numbers on either side of x, one of them by chance: x plus a random part of a unit, cut off.
template <class L>
REEF_LANE typename L::Floats stochastic_float16(typename L::Floats x, typename L::Ints random) {
  const auto most = L::all(65504.0F);
  const auto part = chance<L>(random);
  const auto unit = half_unit<L>(OptimDtype::kFloat16, x) + half_unit<L>(OptimDtype::kFloat16, x);
  const auto units = abs(x) / unit + part;  // at most 2^11: exact to 2^-13
  return copysign(min(to_floats(to_ints(units)) * unit, most), x);
}

template <class L>
REEF_LANE void store_stochastic(OptimDtype dtype, std::byte* to, int i, typename L::Floats x,
                                typename L::Ints random) {
  auto* const halves = reinterpret_cast<std::uint16_t*>(to) + i;
  if (dtype == OptimDtype::kBFloat16) return L::store_halves(halves, to_bfloat16_stochastic<L>(x, random));
  L::store_float16(halves, stochastic_float16<L>(x, random));
}

/// What rounding to `kept` lost of x, as a byte's number from -127 to 127 (2602.23349, section 3.1), and
/// back.
template <class L>
REEF_LANE typename L::Ints rest_of(OptimDtype dtype, typename L::Floats x, typename L::Floats kept) {
  const auto one = L::all(1.0F);
  const auto part = (x - kept) / half_unit<L>(dtype, kept);
  return rounded(min(max(part, L::all(-1.0F)), one) * L::all(127.0F));
}
template <class L>
REEF_LANE typename L::Floats with_rest(OptimDtype dtype, typename L::Floats kept, typename L::Ints byte) {
  const auto rest = (to_floats(byte) - L::all(128.0F)) * L::all(1.0F / 127);
  return fma(rest, half_unit<L>(dtype, kept), kept);
}

}  // namespace reef::kernels
