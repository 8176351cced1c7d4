#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/optim_step.h"
#include "kernels/optim_step/prefetch.h"
#include "kernels/optim_step/rounding.h"
#include "kernels/optim_step/rules.h"

/// Reads a tile of parameters and gradients as float32, and writes parameters back. Float32 and bfloat16 are
/// used in place unless they must be scaled or have a master; all else is converted in a buffer. The
/// functions are noinline, so that they are compiled once for an instruction set and not for each rule and
/// format.
namespace reef::kernels {

/// The numbers of a tile, in float32 or bfloat16. The branch on the dtype goes the same way for the whole
/// tile.
template <class L>
struct Numbers {
  using F = typename L::Floats;
  float* floats = nullptr;
  std::uint16_t* bfloats = nullptr;

  bool are_there() const { return floats != nullptr || bfloats != nullptr; }
  F load(int i) const {
    if (bfloats != nullptr) return floats_of_bits(shift_left<16>(L::load_halves(bfloats + i)));
    return L::load(floats + i);
  }
  void store(int i, F x) const {
    if (bfloats != nullptr) return L::store_halves(bfloats + i, to_bfloat16<L>(x));
    L::store(floats + i, x);
  }
  void prefetch(int i, std::uintptr_t ahead) const {
    if (bfloats != nullptr) return L::prefetch(bfloats + i, ahead);
    L::prefetch(floats + i, ahead);
  }
};

/// The parameters of a tile, which the step sees as float32.
template <class L>
class ParameterTile {
 public:
  using F = typename L::Floats;

  explicit ParameterTile(const OptimTensor& tensor)
      : dtype_(tensor.parameter_dtype), kind_(tensor.master_kind) {
    if (dtype_ == OptimDtype::kFloat32) kind_ = OptimMaster::kNone;
    in_place_ = kind_ == OptimMaster::kNone && dtype_ != OptimDtype::kFloat16;
  }

  /// Returns the tile's parameters. The step overwrites them with the new ones before close().
  [[gnu::noinline, REEF_FLAT]] Numbers<L> open(const OptimTensor& tensor, std::int64_t tile,
                                               std::uint32_t key) {
    const std::int64_t first = tile * kTileElements;
    key_ = key;
    parameter_ = tensor.parameter + first * optim_dtype_bytes(dtype_);
    if (kind_ == OptimMaster::kFloat32) return {master_ = reinterpret_cast<float*>(tensor.master) + first};
    if (dtype_ == OptimDtype::kFloat32) return {reinterpret_cast<float*>(parameter_)};
    if (in_place_) return {nullptr, reinterpret_cast<std::uint16_t*>(parameter_)};
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
    if (!in_place_) write();
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
  bool in_place_;
  std::uint32_t key_ = 0;
  std::byte* parameter_ = nullptr;
  float* master_ = nullptr;
  std::uint8_t* rest_ = nullptr;
  alignas(64) float values_[kTileElements];
};

/// The gradients of a tile as a rule sees them: float32, scaled, with coupled decay added.
template <class L>
class GradientTile {
 public:
  using F = typename L::Floats;

  explicit GradientTile(std::uintptr_t ahead) : ahead_(ahead) {}  ///< prefetch distance in bytes

  /// Returns the gradients, or nothing if one of them is not finite. Adds the decay of the parameters `p`, if
  /// there are any.
  [[gnu::noinline, REEF_FLAT]] Numbers<L> open(const OptimTensor& tensor, std::int64_t tile,
                                               const Numbers<L>& p) {
    const Numbers<L> g = read(tensor, tile);
    if (!finite(g)) return {};
    const float decay = tensor.constants.coupled_decay;
    if (!p.are_there() || decay == 0) return g;
    for (int i = 0; i < kTileElements; i += L::kLanes) {
      L::store(values_ + i, coupled<L>(p.load(i), g.load(i), decay));
    }
    return {values_};
  }

  [[gnu::noinline, REEF_FLAT]] std::int64_t count_nonfinite(const OptimTensor& tensor, std::int64_t tile) {
    const Numbers<L> g = read(tensor, tile);
    if (g.floats != values_) {
      for (int i = 0; i < kTileElements; i += L::kLanes) L::store(values_ + i, g.load(i));
    }
    return std::count_if(values_, values_ + kTileElements, [](float x) { return !(x - x == 0); });
  }

 private:
  Numbers<L> read(const OptimTensor& tensor, std::int64_t tile) {
    const OptimDtype dtype = tensor.gradient_dtype;
    std::byte* const from =
        const_cast<std::byte*>(tensor.gradient) + tile * kTileElements * optim_dtype_bytes(dtype);
    if (tensor.constants.gradient == 1) {
      if (dtype == OptimDtype::kFloat32) return {reinterpret_cast<float*>(from)};
      if (dtype == OptimDtype::kBFloat16) return {nullptr, reinterpret_cast<std::uint16_t*>(from)};
    }
    const F gain = L::all(tensor.constants.gradient);
    for (int i = 0; i < kTileElements; i += L::kLanes) {
      L::prefetch(from + i * optim_dtype_bytes(dtype), kPrefetchBytes);
      L::store(values_ + i, load_as_float<L>(dtype, from, i) * gain);
    }
    return {values_};
  }

  bool finite(const Numbers<L>& g) const {
    constexpr int kTogether = 4;  // Independent sums, which do not wait for each other.
    F poison[kTogether] = {};     // 0 until a value is not finite, NaN from then on.
    for (int i = 0; i < kTileElements; i += kTogether * L::kLanes) {
      for (int k = 0; k < kTogether; ++k) {
        const int at = i + k * L::kLanes;
        g.prefetch(at, ahead_);
        poison[k] = fma(g.load(at), L::all(0.0F), poison[k]);
      }
    }
    const F any = (poison[0] + poison[1]) + (poison[2] + poison[3]);
    return all(any >= any);
  }

  std::uintptr_t ahead_;
  alignas(64) float values_[kTileElements];
};

}  // namespace reef::kernels
