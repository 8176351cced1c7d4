#pragma once

#include <cstdint>

#include "kernels/optim_step.h"
#include "kernels/optim_step/codecs.h"
#include "kernels/optim_step/rounding.h"

/// How a tile of parameters and gradients is read as float32 and written back. Float32 and, where nothing is
/// kept beside the parameter, bfloat16 are read and written in place, by lanes; of others a tile is converted
/// on the side.
namespace reef::kernels {

template <class L>
struct Float32Lanes {
  using F = typename L::Floats;
  float* values;

  F load(int i) const { return L::load(values + i); }
  void store(int i, F x) const { L::store(values + i, x); }
  void prefetch(int i, std::uintptr_t ahead) const { L::prefetch(values + i, ahead); }
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
  void prefetch(int i, std::uintptr_t ahead) const { L::prefetch(values + i, ahead); }
};

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
      L::prefetch(parameter_ + 2 * i, kPrefetchBytes);
      F x = load_as_float<L>(dtype_, parameter_, i);
      if (kind_ == OptimMaster::kSplit) x = with_rest<L>(dtype_, x, L::load_bytes(rest_ + i));
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
        store_stochastic<L>(dtype_, parameter_, i, x, random_bits<L>(key_, i));
      } else {
        store_rounded<L>(dtype_, parameter_, i, x);
      }
    }
    if (kind_ != OptimMaster::kSplit) return;
    for (int i = 0; i < kTileElements; i += 4 * L::kLanes) {
      typename L::Ints rests[4];
      for (int k = 0; k < 4; ++k) {
        const int at = i + k * L::kLanes;
        rests[k] = rest_of<L>(dtype_, L::load(values_ + at), load_as_float<L>(dtype_, parameter_, at));
      }
      L::template store_bytes<128>(rest_ + i, rests);
    }
  }

 private:
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
      L::prefetch(from + i * optim_dtype_bytes(tensor.gradient_dtype), kPrefetchBytes);
      L::store(values_ + i, load_as_float<L>(tensor.gradient_dtype, from, i) * gain);
    }
    return {values_};
  }

 private:
  alignas(64) float values_[kTileElements];
};

}  // namespace reef::kernels
