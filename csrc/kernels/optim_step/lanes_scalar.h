#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/lane.h"
#include "kernels/optim_step/maps.h"

/// A single lane, for any processor and for CUDA devices. This header documents the interface of lanes: all
/// kinds of lanes have the same functions and return the same bits.
namespace reef::kernels::scalar {

struct Floats {
  float v;
};
struct Ints {
  std::int32_t v;
};
struct Mask {
  bool v;
};

// Each operator rounds its own result. Compilers are kept from contracting them into an fma() by
// -ffp-contract=off on the host and by -fmad=false on a device.
REEF_LANE Floats operator+(Floats a, Floats b) { return {a.v + b.v}; }
REEF_LANE Floats operator-(Floats a, Floats b) { return {a.v - b.v}; }
REEF_LANE Floats operator*(Floats a, Floats b) { return {a.v * b.v}; }
REEF_LANE Floats operator/(Floats a, Floats b) { return {a.v / b.v}; }
REEF_LANE Floats fma(Floats a, Floats b, Floats c) { return {::fmaf(a.v, b.v, c.v)}; }
/// Returns c - a * b, rounded once.
REEF_LANE Floats fnma(Floats a, Floats b, Floats c) { return {::fmaf(-a.v, b.v, c.v)}; }
REEF_LANE Floats sqrt(Floats a) { return {::sqrtf(a.v)}; }
REEF_LANE Floats abs(Floats a) { return {::fabsf(a.v)}; }
// These return b if either is NaN, like the x86 instructions.
REEF_LANE Floats min(Floats a, Floats b) { return {a.v < b.v ? a.v : b.v}; }
REEF_LANE Floats max(Floats a, Floats b) { return {a.v > b.v ? a.v : b.v}; }
/// Returns the larger of `size`, which must not be negative, and |x|.
REEF_LANE Floats max_size(Floats size, Floats x) { return max(size, abs(x)); }
REEF_LANE Mask operator>=(Floats a, Floats b) { return {a.v >= b.v}; }
REEF_LANE Mask operator>(Floats a, Floats b) { return {a.v > b.v}; }
REEF_LANE bool all(Mask m) { return m.v; }
REEF_LANE Floats select(Mask m, Floats a, Floats b) { return m.v ? a : b; }
REEF_LANE Floats copysign(Floats size, Floats sign) { return {::copysignf(size.v, sign.v)}; }

// Integers wrap around.
REEF_LANE std::int32_t wrapped(std::uint32_t x) { return static_cast<std::int32_t>(x); }
REEF_LANE std::uint32_t raw(Ints a) { return static_cast<std::uint32_t>(a.v); }
REEF_LANE Ints operator+(Ints a, Ints b) { return {wrapped(raw(a) + raw(b))}; }
REEF_LANE Ints operator-(Ints a, Ints b) { return {wrapped(raw(a) - raw(b))}; }
REEF_LANE Ints operator*(Ints a, Ints b) { return {wrapped(raw(a) * raw(b))}; }
REEF_LANE Ints operator&(Ints a, Ints b) { return {a.v & b.v}; }
REEF_LANE Ints operator|(Ints a, Ints b) { return {a.v | b.v}; }
REEF_LANE Ints operator^(Ints a, Ints b) { return {a.v ^ b.v}; }
REEF_LANE Ints min(Ints a, Ints b) { return {a.v < b.v ? a.v : b.v}; }
REEF_LANE Ints max(Ints a, Ints b) { return {a.v > b.v ? a.v : b.v}; }
REEF_LANE Ints abs(Ints a) { return {a.v < 0 ? wrapped(0U - raw(a)) : a.v}; }
REEF_LANE Mask operator>(Ints a, Ints b) { return {a.v > b.v}; }
REEF_LANE Ints select(Mask m, Ints a, Ints b) { return m.v ? a : b; }
REEF_LANE Ints add_where(Mask m, Ints a, Ints b) { return m.v ? a + b : a; }
template <int kBits>
REEF_LANE Ints shift_right(Ints a) {
  return {wrapped(raw(a) >> kBits)};
}
template <int kBits>
REEF_LANE Ints shift_left(Ints a) {
  return {wrapped(raw(a) << kBits)};
}
REEF_LANE Ints bits_of(Floats a) {
  Ints bits;
  memcpy(&bits.v, &a.v, sizeof bits.v);
  return bits;
}
REEF_LANE Floats floats_of_bits(Ints a) {
  Floats value;
  memcpy(&value.v, &a.v, sizeof value.v);
  return value;
}
REEF_LANE Floats to_floats(Ints a) { return {static_cast<float>(a.v)}; }
REEF_LANE Ints to_ints(Floats a) { return {static_cast<std::int32_t>(a.v)}; }
REEF_LANE Ints rounded(Floats a) { return {static_cast<std::int32_t>(::rintf(a.v))}; }

/// Returns only the sign bit of a float; `size ^ sign` gives this sign to a magnitude.
REEF_LANE Ints sign_of(Floats a) { return {bits_of(a).v & INT32_MIN}; }
REEF_LANE Floats operator^(Floats size, Ints sign) { return floats_of_bits(bits_of(size) ^ sign); }
/// Returns a, negated if the sign bit of `sign` is set.
REEF_LANE Ints with_sign(Ints a, Floats sign) { return bits_of(sign).v < 0 ? Ints{0} - a : a; }

/// Returns the number of the part of the number line that a magnitude is in. Its low five bits index the
/// tables of `Regions`.
template <Regions::Parts kParts>
REEF_LANE Ints part_of(Floats size) {
  if constexpr (kParts == Regions::Parts::kBinades) {
    return shift_right<23>(bits_of(max(size, Floats{Regions::kLeastBinade})));
  } else {
    return shift_right<21>(bits_of(max(size, Floats{Regions::kLeastQuarter})));
  }
}

/// Convert like the processor's own instructions: to float32 exactly, to float16 rounding to nearest, ties to
/// even.
REEF_LANE float float_of_float16(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000U) << 16;
  const std::uint32_t size = half & 0x7FFFU;
  if (size >= 0x7C00U) return floats_of_bits({wrapped(sign | 0x7F800000U | (size & 0x3FFU) << 13)}).v;
  // The product corrects the bias of the exponent, and is right for subnormal numbers too.
  const float value = floats_of_bits({wrapped(size << 13)}).v * 0x1p112F;
  return ::copysignf(value, floats_of_bits({wrapped(sign | 0x3F800000U)}).v);
}
REEF_LANE std::uint16_t float16_of_float(float x) {
  const std::uint32_t bits = raw(bits_of(Floats{x}));
  const std::uint32_t sign = bits >> 16 & 0x8000U;
  const std::uint32_t size = bits & 0x7FFFFFFFU;
  std::uint32_t half = 0;
  if (size > 0x7F800000U) {
    half = 0x7E00U | (size >> 13 & 0x3FFU);
  } else if (size >= 0x477FF000U) {  // Rounds to 65536 or more: infinity.
    half = 0x7C00U;
  } else if (size < 0x38800000U) {  // Below 2^-14: subnormal, in units of 2^-24.
    half = static_cast<std::uint32_t>(::rintf(floats_of_bits({wrapped(size)}).v * 0x1p24F));
  } else {
    const std::uint32_t odd = size >> 13 & 1U;
    half = (size + 0xFFFU + odd - 0x38000000U) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

struct Lanes {
  using Floats = scalar::Floats;
  using Ints = scalar::Ints;
  static constexpr int kLanes = 1;
  /// There are no vector registers to hold tables, but staging a tile is slower for a single lane.
  static constexpr bool kHoldsTables = true;
  REEF_LANE static Floats all(float x) { return {x}; }
  REEF_LANE static Ints all(std::int32_t x) { return {x}; }
  REEF_LANE static Ints index() { return {0}; }
  REEF_LANE static Floats load(const float* from) { return {*from}; }
  REEF_LANE static void store(float* to, Floats x) { *to = x.v; }
  REEF_LANE static Ints load_bytes(const std::uint8_t* from) { return {*from}; }
  /// Adds kAdded to four consecutive vectors and stores them as bytes, saturated to [0, 255].
  template <int kAdded>
  REEF_LANE static void store_bytes(std::uint8_t* to, const Ints (&x)[4]) {
    for (int i = 0; i < 4; ++i) {
      to[i] = static_cast<std::uint8_t>(max(min(x[i] + Ints{kAdded}, Ints{255}), Ints{0}).v);
    }
  }
  REEF_LANE static Ints load_halves(const std::uint16_t* from) { return {*from}; }
  REEF_LANE static void store_halves(std::uint16_t* to, Ints x) { *to = static_cast<std::uint16_t>(x.v); }
  REEF_LANE static Floats load_float16(const std::uint16_t* from) { return {float_of_float16(*from)}; }
  REEF_LANE static void store_float16(std::uint16_t* to, Floats x) { *to = float16_of_float(x.v); }
  /// Finds the largest lane of each vector, and packs these lanes into as few vectors as can hold them.
  template <std::size_t kCount>
  REEF_LANE static void largest(const Floats (&x)[kCount], Floats (&to)[kCount]) {
    for (std::size_t i = 0; i < kCount; ++i) to[i] = x[i];
  }
  REEF_LANE static void prefetch(const void*, std::uintptr_t) {}

  /// Tables of eight, nine or sixteen entries, indexed by the low three bits (eight) or four bits of an
  /// integer.
  struct Table8 {
    REEF_LANE explicit Table8(const float* from) : v(from) {}
    REEF_LANE Floats operator[](Ints i) const { return {v[i.v & 7]}; }
    const float* v;
  };
  struct Table16 {
    REEF_LANE explicit Table16(const float* from) : v(from) {}
    REEF_LANE Floats operator[](Ints i) const { return {v[i.v & 15]}; }
    const float* v;
  };
  /// The low four bits of an index must be at most 8. `from` must have 16 elements.
  struct Table9 {
    Table9() = default;
    REEF_LANE explicit Table9(const float* from) { memcpy(v, from, sizeof v); }
    REEF_LANE Floats operator[](Ints i) const { return {v[i.v & 15]}; }
    REEF_LANE Table9 operator*(float x) const {
      Table9 product = *this;
      for (float& entry : product.v) entry *= x;
      return product;
    }
    float v[16];
  };

  /// A Table9 whose entry 0 is used for code 0 only, which decodes to 0. Lanes may keep entry 8 in its place,
  /// and then correct the value of code 0 in zero_of_zero().
  using LineTable = Table9;
  REEF_LANE static Floats zero_of_zero(Floats value, Ints) { return value; }

  /// Finds the number of the region that a magnitude is in, which is the number of edges that it has reached.
  template <Regions::Parts kParts>
  struct RegionSearch {
    REEF_LANE explicit RegionSearch(const Regions& of)
        : edge_in_part(of.edge_in_part), region_of_part(of.region_of_part) {}
    REEF_LANE Ints operator()(Floats size) const {
      const int part = part_of<kParts>(size).v & 31;
      const Ints region = bits_of(Floats{region_of_part[part]});
      return add_where(size >= Floats{edge_in_part[part]}, region, Ints{1});
    }
    const float* edge_in_part;
    const float* region_of_part;
  };
  /// Does the same on a dynamic map. The magnitude must be at least DynamicMap::kLeast.
  struct DecadeSearch {
    struct Region {
      Ints number;
      Ints as_exponent;  ///< the number in the exponent bits of a float
    };
    REEF_LANE explicit DecadeSearch(const DynamicMap& map) : jump(map.jump) {}
    REEF_LANE Region operator()(Floats size) const {
      const Ints bits = bits_of(size);
      const Ints jumped = bits + bits_of(Floats{jump[shift_right<23>(bits).v & 31]});
      return {shift_right<23>(jumped), jumped & Ints{-0x800000}};
    }
    const float* jump;
  };
};

}  // namespace reef::kernels::scalar
