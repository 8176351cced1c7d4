#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/optim_step.h"
#include "kernels/optim_step/codecs.h"

/// How a tile of parameters and gradients is read as float32 and written back. Float32 and, where nothing is
/// kept beside the parameter, bfloat16 are read and written in place, by lanes; of others a tile is converted
/// on the side.
namespace reef::kernels {

template <class L>
typename L::Floats load_as_float(OptimDtype dtype, const std::byte* from, int i) {
  if (dtype == OptimDtype::kFloat32) return L::load(reinterpret_cast<const float*>(from) + i);
  const auto* const halves = reinterpret_cast<const std::uint16_t*>(from) + i;
  if (dtype == OptimDtype::kFloat16) return L::load_float16(halves);
  return floats_of_bits(shift_left<16>(L::load_halves(halves)));
}

/// To the nearest, ties to even. Not for NaN.
template <class L>
typename L::Ints to_bfloat16(typename L::Floats x) {
  const auto bits = bits_of(x);
  return shift_right<16>(bits + L::all(0x7FFF) + (shift_right<16>(bits) & L::all(1)));
}

template <class L>
void store_rounded(OptimDtype dtype, std::byte* to, int i, typename L::Floats x) {
  if (dtype == OptimDtype::kFloat32) return L::store(reinterpret_cast<float*>(to) + i, x);
  auto* const halves = reinterpret_cast<std::uint16_t*>(to) + i;
  if (dtype == OptimDtype::kFloat16) return L::store_float16(halves, x);
  L::store_halves(halves, to_bfloat16<L>(x));
}

template <class L>
struct Float32Lanes {
  using F = typename L::Floats;
  float* values;

  F load(int i) const { return L::load(values + i); }
  void store(int i, F x) const { L::store(values + i, x); }
  void prefetch(int i) const { prefetch_ahead<L>(values + i); }
};

template <class L>
struct BFloat16Lanes {
  using F = typename L::Floats;
  std::uint16_t* values;

  BFloat16Lanes(const std::byte* tensor, std::int64_t tile)
      : values(reinterpret_cast<std::uint16_t*>(const_cast<std::byte*>(tensor)) + tile * kTileElements) {}
  static bool fits(const OptimTensor& tensor) {
    return tensor.parameter_dtype == OptimDtype::kBFloat16 && tensor.master_kind == OptimMaster::kNone &&
           tensor.gradient_dtype == OptimDtype::kBFloat16 && tensor.constants.gradient == 1;
  }

  F load(int i) const { return floats_of_bits(shift_left<16>(L::load_halves(values + i))); }
  void store(int i, F x) const { L::store_halves(values + i, to_bfloat16<L>(x)); }
  void prefetch(int i) const { prefetch_ahead<L>(values + i); }
};

/// Half a unit in the last place of a 16-bit number given as float32, of its normal numbers' smallest below
/// them.
template <class L>
typename L::Floats half_unit(OptimDtype dtype, typename L::Floats x) {
  const bool brain = dtype == OptimDtype::kBFloat16;
  const int digits = brain ? 8 : 11;                // with the hidden one
  const int least = brain ? digits + 1 : 127 - 14;  // biased exponent whose half unit is still a normal float
  const auto exponent = max(shift_right<23>(bits_of(abs(x))), L::all(least));
  return floats_of_bits(shift_left<23>(exponent - L::all(digits)));
}

/// The float16 numbers on either side of x, one of them by chance: x plus a random part of a unit, cut off.
template <class L>
typename L::Floats stochastic_float16(typename L::Floats x, typename L::Ints random) {
  const auto most = L::all(65504.0F);
  const auto part = to_floats(random & L::all(0xFFFF)) * L::all(1.0F / 65536);
  const auto unit = half_unit<L>(OptimDtype::kFloat16, x) + half_unit<L>(OptimDtype::kFloat16, x);
  const auto units = abs(x) / unit + part;  // at most 2^11: exact to 2^-13
  return copysign(min(to_floats(to_ints(units)) * unit, most), x);
}

/// The parameters of a tile: float32 while the step works on them.
template <class L>
class ParameterTile {
 public:
  using F = typename L::Floats;

  explicit ParameterTile(const OptimTensor& tensor)
      : dtype_(tensor.parameter_dtype), kind_(tensor.master_kind) {
    if (dtype_ == OptimDtype::kFloat32) kind_ = OptimMaster::kNone;
  }

  Float32Lanes<L> open(const OptimTensor& tensor, std::int64_t tile, std::uint32_t key) {
    const std::int64_t first = tile * kTileElements;
    key_ = key;
    parameter_ = tensor.parameter + first * optim_dtype_bytes(dtype_);
    if (kind_ == OptimMaster::kFloat32) return {master_ = reinterpret_cast<float*>(tensor.master) + first};
    if (dtype_ == OptimDtype::kFloat32) return {reinterpret_cast<float*>(parameter_)};
    if (kind_ == OptimMaster::kSplit) rest_ = reinterpret_cast<std::uint8_t*>(tensor.master) + first;
    for (int i = 0; i < kTileElements; i += L::kLanes) {
      prefetch_ahead<L>(parameter_ + 2 * i);
      F x = load_as_float<L>(dtype_, parameter_, i);
      if (kind_ == OptimMaster::kSplit) {
        const F rest = (to_floats(L::load_bytes(rest_ + i)) - L::all(128.0F)) * L::all(1.0F / 127);
        x = fma(rest, half_unit<L>(dtype_, x), x);
      }
      L::store(values_ + i, x);
    }
    return {values_};
  }

  void close() {
    if (dtype_ == OptimDtype::kFloat32) return;
    const float* const values = kind_ == OptimMaster::kFloat32 ? master_ : values_;
    for (int i = 0; i < kTileElements; i += L::kLanes) {
      const F x = L::load(values + i);
      if (kind_ == OptimMaster::kStochastic) {
        store_stochastic(i, x);
      } else {
        store_rounded<L>(dtype_, parameter_, i, x);
      }
    }
    if (kind_ != OptimMaster::kSplit) return;
    for (int i = 0; i < kTileElements; i += 4 * L::kLanes) {
      typename L::Ints rests[4];
      for (int k = 0; k < 4; ++k) rests[k] = rest(i + k * L::kLanes);
      L::template store_bytes<128>(rest_ + i, rests);
    }
  }

 private:
  void store_stochastic(int i, F x) {
    const auto random = random_bits<L>(key_, i);
    auto* const halves = reinterpret_cast<std::uint16_t*>(parameter_) + i;
    if (dtype_ == OptimDtype::kBFloat16) return L::store_halves(halves, to_bfloat16_stochastic<L>(x, random));
    L::store_float16(halves, stochastic_float16<L>(x, random));
  }
  typename L::Ints rest(int i) const {
    const F kept = load_as_float<L>(dtype_, parameter_, i);
    const F one = L::all(1.0F);
    const F part = (L::load(values_ + i) - kept) / half_unit<L>(dtype_, kept);
    return rounded(min(max(part, L::all(-1.0F)), one) * L::all(127.0F));
  }

  OptimDtype dtype_;
  OptimMaster kind_;
  std::uint32_t key_ = 0;
  std::byte* parameter_ = nullptr;
  float* master_ = nullptr;
  std::uint8_t* rest_ = nullptr;
  alignas(64) float values_[kTileElements];
};

/// The gradients of a tile, as float32.
template <class L>
class GradientTile {
 public:
  using F = typename L::Floats;

  Float32Lanes<L> open(const OptimTensor& tensor, std::int64_t tile) {
    const std::int64_t first = tile * kTileElements;
    const bool whole = tensor.gradient_dtype == OptimDtype::kFloat32;
    std::byte* const from =
        const_cast<std::byte*>(tensor.gradient) + first * optim_dtype_bytes(tensor.gradient_dtype);
    if (whole && tensor.constants.gradient == 1) return {reinterpret_cast<float*>(from)};
    const F gain = L::all(tensor.constants.gradient);
    for (int i = 0; i < kTileElements; i += L::kLanes) {
      prefetch_ahead<L>(from + i * optim_dtype_bytes(tensor.gradient_dtype));
      L::store(values_ + i, load_as_float<L>(tensor.gradient_dtype, from, i) * gain);
    }
    return {values_};
  }

 private:
  alignas(64) float values_[kTileElements];
};

}  // namespace reef::kernels
