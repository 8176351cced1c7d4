#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/lane.h"
#include "kernels/optim_step.h"

/// Reads and writes 16-bit numbers, rounded to nearest or stochastically, and computes the rounding errors
/// that may be kept: formulas for any kind of lanes.
namespace reef::kernels {

/// MurmurHash3's finalizer.
REEF_LANE std::uint32_t mixed(std::uint32_t x) {
  x = (x ^ x >> 16) * 0x85EBCA6BU;
  x = (x ^ x >> 13) * 0xC2B2AE35U;
  return x ^ x >> 16;
}
/// The difference in tensor keys that corresponds to one tile: tile n of a tensor has the same key as tile 0
/// of a tensor whose key is n * kTileKey greater.
inline constexpr std::uint32_t kTileKey = 0x9E3779B1U;
/// Returns the key for the stochastic rounding of a tensor in a step. If the tensor is a part of a larger
/// one, `first` is the element with which it begins, so that its tiles have the same keys as in the larger
/// tensor.
REEF_LANE std::uint32_t key_of_tensor(std::int64_t step, std::int64_t first) {
  return mixed(static_cast<std::uint32_t>(step)) +
         static_cast<std::uint32_t>(first / kTileElements) * kTileKey;
}
/// Return the key of a tile of a tensor, and the key of state number `slot` of a tile.
REEF_LANE std::uint32_t key_of(std::uint32_t tensor_key, std::int64_t tile) {
  return mixed(tensor_key + static_cast<std::uint32_t>(tile) * kTileKey);
}
REEF_LANE std::uint32_t key_of_state(std::uint32_t tile_key, int slot) {
  return mixed(tile_key + static_cast<std::uint32_t>(slot) + 1);
}

/// Returns the key of a tile that is encoded outside of a step.
REEF_LANE std::uint32_t key_of_encoded(const OptimState& state, std::int64_t tile) {
  return static_cast<std::uint32_t>(state.first / kTileElements + tile);
}

/// Returns 32 random bits for each lane. They depend only on the key and the element's number in its tile, so
/// every rank and every run draws the same bits.
template <class L>
REEF_LANE typename L::Ints random_bits(std::uint32_t key, int i) {
  using I = typename L::Ints;
  const auto all = [](std::uint32_t x) { return L::all(static_cast<std::int32_t>(x)); };
  constexpr std::uint32_t kSpread = 0x9E3779B1U;
  // The product of kSpread and the sum of lane, element and key; all but the lane's part is one number.
  I x = L::index() * all(kSpread) + all((static_cast<std::uint32_t>(i) + key) * kSpread);
  x = (x ^ shift_right<16>(x)) * all(0x85EBCA6BU);  // The same as mixed().
  x = (x ^ shift_right<13>(x)) * all(0xC2B2AE35U);
  return x ^ shift_right<16>(x);
}

/// Returns a number in [0, 1) from the low 16 random bits.
template <class L>
REEF_LANE typename L::Floats chance(typename L::Ints random) {
  return to_floats(random & L::all(0xFFFF)) * L::all(1.0F / 65536);
}

/// Rounds to the nearest bfloat16, ties to even. x must not be NaN.
template <class L>
REEF_LANE typename L::Ints to_bfloat16(typename L::Floats x) {
  const auto bits = bits_of(x);
  return shift_right<16>(bits + L::all(0x7FFF) + (shift_right<16>(bits) & L::all(1)));
}

/// Rounds to one of the two neighbouring bfloat16 numbers at random, so that the mean is x. x must not be
/// NaN.
template <class L>
REEF_LANE typename L::Ints to_bfloat16_stochastic(typename L::Floats x, typename L::Ints random) {
  // Beyond the largest bfloat16, a carry would produce an infinity.
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

/// Returns half a unit in the last place of a 16-bit number that is given as float32, but at least that of
/// the smallest normal float16, or, for bfloat16, the smallest normal float32.
template <class L>
REEF_LANE typename L::Floats half_unit(OptimDtype dtype, typename L::Floats x) {
  const bool brain = dtype == OptimDtype::kBFloat16;
  const int digits = brain ? 8 : 11;                // Significant bits, with the implicit one.
  const int least = brain ? digits + 1 : 127 - 14;  // The lower bound of the biased exponent.
  const auto exponent = max(shift_right<23>(bits_of(abs(x))), L::all(least));
  return floats_of_bits(shift_left<23>(exponent - L::all(digits)));
}

/// Rounds to one of the two neighbouring float16 numbers at random: adds a random part of a unit to x and
/// truncates.
template <class L>
REEF_LANE typename L::Floats stochastic_float16(typename L::Floats x, typename L::Ints random) {
  const auto most = L::all(65504.0F);
  const auto part = chance<L>(random);
  const auto unit = half_unit<L>(OptimDtype::kFloat16, x) + half_unit<L>(OptimDtype::kFloat16, x);
  const auto units = abs(x) / unit + part;  // At most 2^11, so it is exact to 2^-13.
  return copysign(min(to_floats(to_ints(units)) * unit, most), x);
}

template <class L>
REEF_LANE void store_stochastic(OptimDtype dtype, std::byte* to, int i, typename L::Floats x,
                                typename L::Ints random) {
  auto* const halves = reinterpret_cast<std::uint16_t*>(to) + i;
  if (dtype == OptimDtype::kBFloat16) return L::store_halves(halves, to_bfloat16_stochastic<L>(x, random));
  L::store_float16(halves, stochastic_float16<L>(x, random));
}

/// rest_of() returns the error of rounding x to `kept` as an integer from -127 to 127 (2602.23349, section
/// 3.1); with_rest() reconstructs x from `kept` and a byte that holds this integer plus 128.
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
