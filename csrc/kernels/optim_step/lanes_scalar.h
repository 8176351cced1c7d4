#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/lane.h"
#include "kernels/optim_step/maps.h"

/// One lane, on any processor and on CUDA devices: what lanes are, by example. All kinds have the
/// same functions and give the same bits.
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

// The operators round each by itself; on the host by -ffp-contract=off, on a device by -fmad=false.
REEF_LANE Floats operator+(Floats a, Floats b) { return {a.v + b.v}; }
REEF_LANE Floats operator-(Floats a, Floats b) { return {a.v - b.v}; }
REEF_LANE Floats operator*(Floats a, Floats b) { return {a.v * b.v}; }
REEF_LANE Floats operator/(Floats a, Floats b) { return {a.v / b.v}; }
REEF_LANE Floats fma(Floats a, Floats b, Floats c) { return {::fmaf(a.v, b.v, c.v)}; }
/// c - a * b
REEF_LANE Floats fnma(Floats a, Floats b, Floats c) { return {::fmaf(-a.v, b.v, c.v)}; }
REEF_LANE Floats sqrt(Floats a) { return {::sqrtf(a.v)}; }
REEF_LANE Floats abs(Floats a) { return {::fabsf(a.v)}; }
// As the x86 instructions: b if either is NaN.
REEF_LANE Floats min(Floats a, Floats b) { return {a.v < b.v ? a.v : b.v}; }
REEF_LANE Floats max(Floats a, Floats b) { return {a.v > b.v ? a.v : b.v}; }
/// The larger of a size, which is not negative, and that of x.
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

/// Only the sign of it; and a size that is not negative, with this sign.
REEF_LANE Ints sign_of(Floats a) { return {bits_of(a).v & INT32_MIN}; }
REEF_LANE Floats operator^(Floats size, Ints sign) { return floats_of_bits(bits_of(size) ^ sign); }
/// a, negated where `sign` has the sign bit.
REEF_LANE Ints with_sign(Ints a, Floats sign) { return bits_of(sign).v < 0 ? Ints{0} - a : a; }

/// Of the number line, by the low five bits: where a region of `Regions` is looked up.
template <Regions::Parts kParts>
REEF_LANE Ints part_of(Floats size) {
  if constexpr (kParts == Regions::Parts::kBinades) {
    return shift_right<23>(bits_of(max(size, Floats{Regions::kLeastBinade})));
  } else {
    return shift_right<21>(bits_of(max(size, Floats{Regions::kLeastQuarter})));
  }
}

/// As the processor's own conversions: exact, and to the nearest with ties to even.
REEF_LANE float float_of_float16(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000U) << 16;
  const std::uint32_t size = half & 0x7FFFU;
  if (size >= 0x7C00U) return floats_of_bits({wrapped(sign | 0x7F800000U | (size & 0x3FFU) << 13)}).v;
  // Subnormals too: the exponent is brought to its place by a product.
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
  } else if (size >= 0x477FF000U) {  // rounds to 65536 or more
    half = 0x7C00U;
  } else if (size < 0x38800000U) {  // below 2^-14: counted in units of 2^-24
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
  /// There are no vector registers to hold tables in, but staging a tile is slower for single lanes.
  static constexpr bool kHoldsTables = true;
  REEF_LANE static Floats all(float x) { return {x}; }
  REEF_LANE static Ints all(std::int32_t x) { return {x}; }
  REEF_LANE static Ints index() { return {0}; }
  REEF_LANE static Floats load(const float* from) { return {*from}; }
  REEF_LANE static void store(float* to, Floats x) { *to = x.v; }
  REEF_LANE static Ints load_bytes(const std::uint8_t* from) { return {*from}; }
  /// Lanes after lanes, with so much added to each, as the nearest of 0 to 255.
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
  /// Of the lanes of each, one after another, in as few lanes as hold them.
  template <std::size_t kCount>
  REEF_LANE static void largest(const Floats (&x)[kCount], Floats (&to)[kCount]) {
    for (std::size_t i = 0; i < kCount; ++i) to[i] = x[i];
  }
  REEF_LANE static void prefetch(const void*, std::uintptr_t) {}

  /// Eight, nine or sixteen entries, each by the low bits of an index: three, or four.
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
  /// The low four bits of an index must be at most 8. `from` has room for 16.
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

  /// The same where entry 0 is for the code 0 alone, whose value is 0: lanes may have entry 8 in its place,
  /// and make it 0 by zero_of_zero().
  using LineTable = Table9;
  REEF_LANE static Floats zero_of_zero(Floats value, Ints) { return value; }

  /// The number of a size's region: how many edges it has reached.
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
  /// The same of a dynamic map, for a size from its kLeast on.
  struct DecadeSearch {
    struct Region {
      Ints number;
      Ints as_exponent;  ///< the number in the place of a float's exponent
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
