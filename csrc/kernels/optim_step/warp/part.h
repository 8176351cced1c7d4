#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/lane.h"
#include "kernels/optim_step.h"
#include "kernels/optim_step/lanes_scalar.h"
#include "kernels/optim_step/rounding.h"

/// A tile by a warp of 32 threads: what one thread does, from one exchange between threads to the next. A
/// thread keeps its eight elements in registers from the gradient to the codes; what it must be told by
/// others is whether a gradient is not finite, and the largest value of a block. So all of it is ordinary
/// code, which the tests run on the CPU, thread by thread. Here: what of a tile a thread has, and how it is
/// read and written.
namespace reef::kernels::warp {

inline constexpr int kThreads = 32;
inline constexpr int kOwn = static_cast<int>(kTileElements) / kThreads;
inline constexpr int kHalf = static_cast<int>(kTileElements) / 2;

/// One lane whose tables are in memory that threads share: their entries lie in banks of their own.
struct Lanes : scalar::Lanes {
  struct Table9 {
    Table9() = default;
    REEF_LANE explicit Table9(const float* from) : v(from) {}
    REEF_LANE Table9(const float* from, float factor) : v(from), by(factor) {}
    REEF_LANE Floats operator[](Ints i) const { return {v[i.v & 15] * by}; }
    REEF_LANE Table9 operator*(float x) const { return {v, x}; }
    const float* v = nullptr;
    float by = 1;
  };
  using LineTable = Table9;
};
using F = Lanes::Floats;
using I = Lanes::Ints;

/// What of a tile a thread has: four elements one after another in each half.
struct Part {
  std::int64_t tile;
  int elements;  ///< of the tile
  int thread;

  /// In the tile, of its own element number k.
  REEF_LANE int element(int k) const { return k / 4 * kHalf + 4 * thread + k % 4; }
  /// In the tensor, of the first in a half.
  REEF_LANE std::int64_t first(int half) const { return tile * kTileElements + element(4 * half); }
  REEF_LANE int there(int half) const { return elements - element(4 * half); }
  REEF_LANE bool has(int k) const { return element(k) < elements; }
};

REEF_LANE Part part_of(std::int64_t tile, std::int64_t elements, int thread) {
  const std::int64_t rest = elements - tile * kTileElements;
  return {tile, static_cast<int>(rest < kTileElements ? rest : kTileElements), thread};
}

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T v[4];
};
/// Of four elements those that are there, at once where that can be; the others are 0.
template <class T>
REEF_LANE Four<T> load4(const void* memory, std::int64_t first, int there) {
  const T* const from = static_cast<const T*>(memory) + first;
  if (there >= 4 && reinterpret_cast<std::uintptr_t>(from) % sizeof(Four<T>) == 0) {
    return *reinterpret_cast<const Four<T>*>(from);
  }
  Four<T> x{};
  REEF_UNROLL
  for (int k = 0; k < 4; ++k) {
    if (k < there) x.v[k] = from[k];
  }
  return x;
}
template <class T>
REEF_LANE void store4(void* memory, std::int64_t first, int there, const Four<T>& x) {
  T* const to = static_cast<T*>(memory) + first;
  if (there >= 4 && reinterpret_cast<std::uintptr_t>(to) % sizeof(Four<T>) == 0) {
    *reinterpret_cast<Four<T>*>(to) = x;
    return;
  }
  REEF_UNROLL
  for (int k = 0; k < 4; ++k) {
    if (k < there) to[k] = x.v[k];
  }
}

/// Numbers of any dtype as floats.
REEF_LANE void read(OptimDtype dtype, const std::byte* memory, const Part& part, F (&x)[kOwn]) {
  REEF_UNROLL
  for (int half = 0; half < 2; ++half) {
    if (dtype == OptimDtype::kFloat32) {
      const auto four = load4<float>(memory, part.first(half), part.there(half));
      REEF_UNROLL
      for (int k = 0; k < 4; ++k) x[4 * half + k] = {four.v[k]};
    } else {
      const auto four = load4<std::uint16_t>(memory, part.first(half), part.there(half));
      const bool brain = dtype == OptimDtype::kBFloat16;
      REEF_UNROLL
      for (int k = 0; k < 4; ++k) {
        x[4 * half + k] = brain ? floats_of_bits(I{four.v[k] << 16}) : F{scalar::float_of_float16(four.v[k])};
      }
    }
  }
}
REEF_LANE void write32(std::byte* memory, const Part& part, const F (&x)[kOwn]) {
  REEF_UNROLL
  for (int half = 0; half < 2; ++half) {
    Four<float> four;
    REEF_UNROLL
    for (int k = 0; k < 4; ++k) four.v[k] = x[4 * half + k].v;
    store4(memory, part.first(half), part.there(half), four);
  }
}
/// Integers, cut off to the elements' width.
template <class T>
REEF_LANE void write_bits(std::byte* memory, const Part& part, const I (&x)[kOwn]) {
  REEF_UNROLL
  for (int half = 0; half < 2; ++half) {
    Four<T> four;
    REEF_UNROLL
    for (int k = 0; k < 4; ++k) four.v[k] = static_cast<T>(x[4 * half + k].v);
    store4(memory, part.first(half), part.there(half), four);
  }
}

/// A parameter, with what is kept beside it.
class Parameter {
 public:
  REEF_LANE explicit Parameter(const OptimTensor& tensor)
      : tensor_(tensor),
        kind_(tensor.parameter_dtype == OptimDtype::kFloat32 ? OptimMaster::kNone : tensor.master_kind) {}

  REEF_LANE void read(const Part& part, F (&x)[kOwn]) const {
    const bool whole = kind_ == OptimMaster::kFloat32;
    warp::read(whole ? OptimDtype::kFloat32 : tensor_.parameter_dtype,
               whole ? tensor_.master : tensor_.parameter, part, x);
    if (kind_ != OptimMaster::kSplit) return;
    REEF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const auto rest = load4<std::uint8_t>(tensor_.master, part.first(half), part.there(half));
      REEF_UNROLL
      for (int k = 0; k < 4; ++k) {
        F& own = x[4 * half + k];
        own = with_rest<Lanes>(tensor_.parameter_dtype, own, I{rest.v[k]});
      }
    }
  }

  REEF_LANE void write(const Part& part, std::uint32_t key, const F (&x)[kOwn]) const {
    if (tensor_.parameter_dtype == OptimDtype::kFloat32) return write32(tensor_.parameter, part, x);
    if (kind_ == OptimMaster::kFloat32) write32(tensor_.master, part, x);
    I halves[kOwn], rests[kOwn];
    REEF_UNROLL
    for (int k = 0; k < kOwn; ++k) {
      std::uint16_t bits = 0;
      auto* const to = reinterpret_cast<std::byte*>(&bits);
      if (kind_ == OptimMaster::kStochastic) {
        const I random = random_bits<Lanes>(key, part.element(k));
        store_stochastic<Lanes>(tensor_.parameter_dtype, to, 0, x[k], random);
      } else {
        store_rounded<Lanes>(tensor_.parameter_dtype, to, 0, x[k]);
      }
      halves[k] = {bits};
      if (kind_ != OptimMaster::kSplit) continue;
      const F kept = load_as_float<Lanes>(tensor_.parameter_dtype, to, 0);
      rests[k] = rest_of<Lanes>(tensor_.parameter_dtype, x[k], kept) + I{128};
    }
    write_bits<std::uint16_t>(tensor_.parameter, part, halves);
    if (kind_ == OptimMaster::kSplit) write_bits<std::uint8_t>(tensor_.master, part, rests);
  }

 private:
  const OptimTensor& tensor_;
  OptimMaster kind_;
};

}  // namespace reef::kernels::warp
