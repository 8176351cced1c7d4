#pragma once

#include <cstdint>

#include "kernels/optim_step.h"
#include "kernels/optim_step/prefetch.h"
#include "kernels/optim_step/rounding.h"
#include "kernels/optim_step/rules.h"

/// How a tile of parameters and gradients is read as float32 and written back. Float32 is read and written in
/// place; other dtypes are converted at the side. What is here is compiled once for an instruction set, not
/// for each rule and format: hence noinline.
namespace reef::kernels {

/// The parameters of a tile: float32 while the step works on them.
template <class L>
class ParameterTile {
 public:
  using F = typename L::Floats;

  explicit ParameterTile(const OptimTensor& tensor)
      : dtype_(tensor.parameter_dtype), kind_(tensor.master_kind) {
    if (dtype_ == OptimDtype::kFloat32) kind_ = OptimMaster::kNone;
  }

  /// The tile's parameters, to be replaced by the new ones before close().
  [[gnu::noinline, REEF_FLAT]] float* open(const OptimTensor& tensor, std::int64_t tile, std::uint32_t key) {
    const std::int64_t first = tile * kTileElements;
    key_ = key;
    parameter_ = tensor.parameter + first * optim_dtype_bytes(dtype_);
    if (kind_ == OptimMaster::kFloat32) return master_ = reinterpret_cast<float*>(tensor.master) + first;
    if (dtype_ == OptimDtype::kFloat32) return reinterpret_cast<float*>(parameter_);
    if (kind_ == OptimMaster::kSplit) rest_ = reinterpret_cast<std::uint8_t*>(tensor.master) + first;
    for (int i = 0; i < kTileElements; i += L::kLanes) {
      L::prefetch(parameter_ + 2 * i, kPrefetchBytes);
      F x = load_as_float<L>(dtype_, parameter_, i);
      if (kind_ == OptimMaster::kSplit) x = with_rest<L>(dtype_, x, L::load_bytes(rest_ + i));
      L::store(values_ + i, x);
    }
    return values_;
  }

  void close() {
    if (dtype_ != OptimDtype::kFloat32) write();
  }

 private:
  [[gnu::noinline, REEF_FLAT]] void write() {
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

  OptimDtype dtype_;
  OptimMaster kind_;
  std::uint32_t key_ = 0;
  std::byte* parameter_ = nullptr;
  float* master_ = nullptr;
  std::uint8_t* rest_ = nullptr;
  alignas(64) float values_[kTileElements];
};

/// The gradients of a tile, as a rule is to see them: float32, scaled, with coupled decay added.
template <class L>
class GradientTile {
 public:
  using F = typename L::Floats;

  /// nullptr if one of them is not finite. Decay is coupled to the parameters `p`, if there are any.
  [[gnu::noinline, REEF_FLAT]] const float* open(const OptimTensor& tensor, std::int64_t tile,
                                                 const float* p) {
    const float* const g = read(tensor, tile);
    if (!finite(g)) return nullptr;
    const float decay = tensor.constants.coupled_decay;
    if (p == nullptr || decay == 0) return g;
    for (int i = 0; i < kTileElements; i += L::kLanes) {
      L::store(values_ + i, coupled<L>(L::load(p + i), L::load(g + i), decay));
    }
    return values_;
  }

  [[gnu::noinline, REEF_FLAT]] std::int64_t count_nonfinite(const OptimTensor& tensor, std::int64_t tile) {
    const float* const g = read(tensor, tile);
    std::int64_t count = 0;
    for (int i = 0; i < kTileElements; ++i) count += !(g[i] - g[i] == 0);
    return count;
  }

 private:
  const float* read(const OptimTensor& tensor, std::int64_t tile) {
    const std::int64_t first = tile * kTileElements;
    const std::byte* const from = tensor.gradient + first * optim_dtype_bytes(tensor.gradient_dtype);
    const bool whole = tensor.gradient_dtype == OptimDtype::kFloat32;
    if (whole && tensor.constants.gradient == 1) return reinterpret_cast<const float*>(from);
    const F gain = L::all(tensor.constants.gradient);
    for (int i = 0; i < kTileElements; i += L::kLanes) {
      L::prefetch(from + i * optim_dtype_bytes(tensor.gradient_dtype), kPrefetchBytes);
      L::store(values_ + i, load_as_float<L>(tensor.gradient_dtype, from, i) * gain);
    }
    return values_;
  }

  static bool finite(const float* g) {
    constexpr int kTogether = 4;  // sums that do not wait for each other
    F poison[kTogether] = {};     // NaN for ever after a value that is not finite, else 0
    for (int i = 0; i < kTileElements; i += kTogether * L::kLanes) {
      for (int k = 0; k < kTogether; ++k) {
        const float* const at = g + i + k * L::kLanes;
        L::prefetch(at, prefetch_bytes);
        poison[k] = fma(L::load(at), L::all(0.0F), poison[k]);
      }
    }
    const F any = (poison[0] + poison[1]) + (poison[2] + poison[3]);
    return all(any >= any);
  }

  alignas(64) float values_[kTileElements];
};

}  // namespace reef::kernels
