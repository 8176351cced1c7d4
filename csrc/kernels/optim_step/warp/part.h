#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/lane.h"
#include "kernels/optim_step.h"
#include "kernels/optim_step/lanes_scalar.h"
#include "kernels/optim_step/rounding.h"

/// A warp of 32 threads works on a tile. The code in warp/ is what a single thread does between two exchanges
/// with other threads. Threads exchange only whether a gradient is not finite, and the largest value of each
/// block, so all of this is ordinary code, which the tests run on the CPU thread by thread.
///
/// A thread has eight elements in two halves. The gradients and new states of both halves stay in registers;
/// everything else is in registers for one half at a time, because a thread has no more of them. This header
/// defines which elements of a tile a thread has, and reads and writes them.
namespace reef::kernels::warp {

inline constexpr int kThreads = 32;
inline constexpr int kOwn = static_cast<int>(kTileElements) / kThreads;
inline constexpr int kHalf = static_cast<int>(kTileElements) / 2;

/// A single lane whose tables are in shared memory, where each entry is in a different bank.
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
REEF_LANE I integer(std::uint32_t bits) { return {scalar::wrapped(bits)}; }

/// Convert 16-bit numbers like load_as_float(), store_rounded() and store_stochastic() of rounding.h, but by
/// value: a variable whose address is taken would be in memory instead of a register.
REEF_LANE F float_of_16_bits(OptimDtype dtype, std::uint32_t bits) {
  if (dtype == OptimDtype::kBFloat16) return floats_of_bits(integer(bits << 16));
  return {scalar::float_of_float16(static_cast<std::uint16_t>(bits))};
}
REEF_LANE I to_16_bits(OptimDtype dtype, F x) {
  return dtype == OptimDtype::kBFloat16 ? to_bfloat16<Lanes>(x) : I{scalar::float16_of_float(x.v)};
}
REEF_LANE I to_16_bits_stochastic(OptimDtype dtype, F x, I random) {
  if (dtype == OptimDtype::kBFloat16) return to_bfloat16_stochastic<Lanes>(x, random);
  return {scalar::float16_of_float(stochastic_float16<Lanes>(x, random).v)};
}

/// The part of a tile that a thread has: four consecutive elements in each half. If kWhole, the tile is whole
/// and all its addresses are aligned, so that no element needs to be checked.
template <bool kWhole>
struct Part {
  std::int64_t tile;
  int elements;  ///< of the tile
  int thread;

  /// Returns the number in the tile of the thread's element k.
  REEF_LANE int element(int k) const { return k / 4 * kHalf + 4 * thread + k % 4; }
  /// Returns the number in the tensor of the thread's first element in a half.
  REEF_LANE std::int64_t first(int half) const { return tile * kTileElements + element(4 * half); }
  REEF_LANE bool has(int k) const { return kWhole || element(k) < elements; }
};

REEF_LANE Part<false> part_of(std::int64_t tile, std::int64_t elements, int thread) {
  const std::int64_t rest = elements - tile * kTileElements;
  return {tile, static_cast<int>(rest < kTileElements ? rest : kTileElements), thread};
}

/// Whether these addresses are multiples of 16 bytes, which is the most that a thread reads or writes at
/// once. This is cheap enough to ask for every tile, whereas a flag for a whole tensor would take a register.
template <class... Memory>
REEF_LANE bool are_aligned(const Memory*... memory) {
  return ((reinterpret_cast<std::uintptr_t>(memory) | ... | std::uintptr_t{0}) & 15U) == 0;
}

/// Tells the compiler that `memory` is in a device's global memory, which has its own load and store
/// instructions. Everything that a step reads and writes is in global memory.
template <class T>
REEF_LANE T* global(T* memory) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(memory));
#endif
  return memory;
}

/// Four elements of kBytes, as they are in memory.
template <int kBytes>
struct alignas(4 * kBytes) Four {
  std::uint32_t words[kBytes];

  REEF_LANE std::uint32_t operator[](int k) const {
    return words[k * kBytes / 4] >> shift(k) & 0xFFFFFFFFU >> (32 - 8 * kBytes);
  }
  /// Sets element k, which must be zero before.
  REEF_LANE void put(int k, std::uint32_t element) { words[k * kBytes / 4] |= element << shift(k); }

 private:
  REEF_LANE static int shift(int k) { return 8 * (k * kBytes % 4); }
};
template <int kBytes>
using Element = std::conditional_t<kBytes == 1, std::uint8_t,
                                   std::conditional_t<kBytes == 2, std::uint16_t, std::uint32_t>>;

/// Loads four elements of a half, beginning with element number `first` of `memory`. Elements beyond the end
/// of the tile are 0.
template <int kBytes, bool kWhole>
REEF_LANE Four<kBytes> load4(const void* memory, std::int64_t first, const Part<kWhole>& part, int half) {
  const auto* const from = global(static_cast<const Element<kBytes>*>(memory) + first);
  if constexpr (kWhole) return *reinterpret_cast<const Four<kBytes>*>(from);
  Four<kBytes> x{};
  REEF_UNROLL
  for (int k = 0; k < 4; ++k) {
    if (part.has(4 * half + k)) x.put(k, from[k]);
  }
  return x;
}
template <int kBytes, bool kWhole>
REEF_LANE void store4(void* memory, std::int64_t first, const Part<kWhole>& part, int half,
                      const Four<kBytes>& x) {
  auto* const to = global(static_cast<Element<kBytes>*>(memory) + first);
  if constexpr (kWhole) {
#ifdef __CUDA_ARCH__  // Ensures a single store instruction.
    if constexpr (kBytes == 4) {
      *reinterpret_cast<uint4*>(to) = {x.words[0], x.words[1], x.words[2], x.words[3]};
      return;
    }
#endif
    *reinterpret_cast<Four<kBytes>*>(to) = x;
  } else {
    REEF_UNROLL
    for (int k = 0; k < 4; ++k) {
      if (part.has(4 * half + k)) to[k] = static_cast<Element<kBytes>>(x[k]);
    }
  }
}

/// Loads four numbers of any dtype without converting them, so that all loads of a tile can be in flight at
/// once. 16-bit numbers are in the first two words.
template <bool kWhole>
REEF_LANE Four<4> load4(OptimDtype dtype, const std::byte* memory, const Part<kWhole>& part, int half) {
  if (dtype == OptimDtype::kFloat32) return load4<4>(memory, part.first(half), part, half);
  const Four<2> four = load4<2>(memory, part.first(half), part, half);
  return {{four.words[0], four.words[1]}};
}
REEF_LANE F to_float(OptimDtype dtype, const Four<4>& four, int k) {
  if (dtype == OptimDtype::kFloat32) return floats_of_bits(integer(four[k]));
  return float_of_16_bits(dtype, Four<2>{{four.words[0], four.words[1]}}[k]);
}
REEF_LANE void to_floats(OptimDtype dtype, const Four<4>& four, F* x) {
  REEF_UNROLL
  for (int k = 0; k < 4; ++k) x[k] = to_float(dtype, four, k);
}
/// Writes the low kBytes bytes of each number.
template <int kBytes, bool kWhole>
REEF_LANE void write4(std::byte* memory, const Part<kWhole>& part, int half, const I* x) {
  Four<kBytes> four{};
  REEF_UNROLL
  for (int k = 0; k < 4; ++k) four.put(k, scalar::raw(x[k]));
  store4(memory, part.first(half), part, half, four);
}
template <bool kWhole>
REEF_LANE void write4(std::byte* memory, const Part<kWhole>& part, int half, const F* x) {
  I bits[4];
  REEF_UNROLL
  for (int k = 0; k < 4; ++k) bits[k] = bits_of(x[k]);
  write4<4>(memory, part, half, bits);
}

/// Reads and writes parameters and their masters, half of a thread's elements at a time.
class Parameter {
 public:
  struct Loaded {
    Four<4> numbers;
    Four<1> rests;
  };

  REEF_LANE explicit Parameter(const OptimTensor& tensor)
      : tensor_(tensor),
        kind_(tensor.parameter_dtype == OptimDtype::kFloat32 ? OptimMaster::kNone : tensor.master_kind) {}

  template <bool kWhole>
  REEF_LANE Loaded load(const Part<kWhole>& part, int half) const {
    Loaded loaded{};
    loaded.numbers = load4(dtype(), has_copy() ? tensor_.master : tensor_.parameter, part, half);
    if (kind_ == OptimMaster::kSplit) {
      loaded.rests = load4<1>(tensor_.master, part.first(half), part, half);
    }
    return loaded;
  }
  REEF_LANE void read(const Loaded& loaded, F* x) const {
    to_floats(dtype(), loaded.numbers, x);
    if (kind_ != OptimMaster::kSplit) return;
    REEF_UNROLL
    for (int k = 0; k < 4; ++k) {
      x[k] = with_rest<Lanes>(tensor_.parameter_dtype, x[k], integer(loaded.rests[k]));
    }
  }

  template <bool kWhole>
  REEF_LANE void write(const Part<kWhole>& part, int half, std::uint32_t key, const F* x) const {
    const OptimDtype dtype = tensor_.parameter_dtype;
    if (dtype == OptimDtype::kFloat32) return write4(tensor_.parameter, part, half, x);
    I bits[4];
    REEF_UNROLL
    for (int k = 0; k < 4; ++k) {
      bits[k] = kind_ == OptimMaster::kStochastic
                    ? to_16_bits_stochastic(dtype, x[k], random_bits<Lanes>(key, part.element(4 * half + k)))
                    : to_16_bits(dtype, x[k]);
    }
    write4<2>(tensor_.parameter, part, half, bits);
    if (has_copy()) write4(tensor_.master, part, half, x);
    if (kind_ != OptimMaster::kSplit) return;
    I rests[4];
    REEF_UNROLL
    for (int k = 0; k < 4; ++k) {
      const F kept = float_of_16_bits(dtype, scalar::raw(bits[k]));
      rests[k] = rest_of<Lanes>(dtype, x[k], kept) + I{128};
    }
    write4<1>(tensor_.master, part, half, rests);
  }

 private:
  REEF_LANE bool has_copy() const { return kind_ == OptimMaster::kFloat32; }
  REEF_LANE OptimDtype dtype() const { return has_copy() ? OptimDtype::kFloat32 : tensor_.parameter_dtype; }

  const OptimTensor& tensor_;
  OptimMaster kind_;
};

}  // namespace reef::kernels::warp
