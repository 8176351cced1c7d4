#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/optim_step/maps.h"

/// Eight lanes of AVX2 with FMA, with the functions of lanes_scalar.h.
namespace reef::kernels::avx2 {

struct Floats {
  __m256 v;
};
struct Ints {
  __m256i v;
};
struct Mask {
  __m256 v;
};

inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats fnma(Floats a, Floats b, Floats c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }
inline Floats sqrt(Floats a) { return {_mm256_sqrt_ps(a.v)}; }
inline Floats abs(Floats a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0F), a.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Floats max_size(Floats size, Floats x) { return max(size, abs(x)); }
inline Mask operator>=(Floats a, Floats b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)}; }
inline Mask operator>(Floats a, Floats b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)}; }
inline bool all(Mask m) { return _mm256_movemask_ps(m.v) == 0xFF; }
inline Floats select(Mask m, Floats a, Floats b) { return {_mm256_blendv_ps(b.v, a.v, m.v)}; }
inline Floats copysign(Floats size, Floats sign) {
  const __m256 bit = _mm256_set1_ps(-0.0F);
  return {_mm256_or_ps(_mm256_andnot_ps(bit, size.v), _mm256_and_ps(bit, sign.v))};
}

inline Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm256_sub_epi32(a.v, b.v)}; }
inline Ints operator&(Ints a, Ints b) { return {_mm256_and_si256(a.v, b.v)}; }
inline Ints operator|(Ints a, Ints b) { return {_mm256_or_si256(a.v, b.v)}; }
inline Ints operator^(Ints a, Ints b) { return {_mm256_xor_si256(a.v, b.v)}; }
inline Ints operator*(Ints a, Ints b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
inline Ints min(Ints a, Ints b) { return {_mm256_min_epi32(a.v, b.v)}; }
inline Ints max(Ints a, Ints b) { return {_mm256_max_epi32(a.v, b.v)}; }
inline Ints abs(Ints a) { return {_mm256_abs_epi32(a.v)}; }
inline Mask operator>(Ints a, Ints b) { return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(a.v, b.v))}; }
inline Ints select(Mask m, Ints a, Ints b) {
  return {_mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(b.v), _mm256_castsi256_ps(a.v), m.v))};
}
inline Ints add_where(Mask m, Ints a, Ints b) {
  return {_mm256_add_epi32(a.v, _mm256_and_si256(_mm256_castps_si256(m.v), b.v))};
}
template <int kBits>
Ints shift_right(Ints a) {
  return {_mm256_srli_epi32(a.v, kBits)};
}
template <int kBits>
Ints shift_left(Ints a) {
  return {_mm256_slli_epi32(a.v, kBits)};
}
inline Ints bits_of(Floats a) { return {_mm256_castps_si256(a.v)}; }
inline Floats floats_of_bits(Ints a) { return {_mm256_castsi256_ps(a.v)}; }
inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline Ints to_ints(Floats a) { return {_mm256_cvttps_epi32(a.v)}; }
inline Ints rounded(Floats a) { return {_mm256_cvtps_epi32(a.v)}; }

inline Ints sign_of(Floats a) { return {_mm256_castps_si256(_mm256_and_ps(a.v, _mm256_set1_ps(-0.0F)))}; }
inline Floats operator^(Floats size, Ints sign) {
  return {_mm256_xor_ps(size.v, _mm256_castsi256_ps(sign.v))};
}
/// If `sign` is +0, this returns 0, where other lanes return a. Callers get the same result, because their
/// `a` is 0 if the number whose sign it takes is 0.
inline Ints with_sign(Ints a, Floats sign) { return {_mm256_sign_epi32(a.v, _mm256_castps_si256(sign.v))}; }

/// Searches for regions (maps.h) do not use the table of all parts of the number line, which would take four
/// registers and thirteen instructions.
///
/// This one is for edges that are about a decade apart: a linear function of the exponent and the first
/// mantissa bits is the number of a region that is right or one too small, so only one edge is compared.
struct DecadeEdges {
  explicit DecadeEdges(const Regions& of) : edge(_mm256_loadu_ps(of.edge)) {}
  Ints operator()(Floats size) const {
    const __m256i above = _mm256_subs_epu16(_mm256_srli_epi32(_mm256_castps_si256(size.v), 16),
                                            _mm256_set1_epi32(Regions::kGuessFrom));
    const __m256i guess = _mm256_mulhi_epu16(above, _mm256_set1_epi32(Regions::kGuessGain));
    const __m256 reached = _mm256_cmp_ps(size.v, _mm256_permutevar8x32_ps(edge, guess), _CMP_GE_OQ);
    return {_mm256_sub_epi32(guess, _mm256_castps_si256(reached))};
  }
  __m256 edge;
};
/// Counts the edges that a magnitude has reached, for any other map.
struct CountedEdges {
  explicit CountedEdges(const Regions& of) {
    for (int i = 0; i < 8; ++i) edge[i] = _mm256_set1_ps(of.edge[i]);
  }
  Ints operator()(Floats size) const {
    __m256i count = _mm256_setzero_si256();
    for (const __m256 at : edge) {
      count = _mm256_sub_epi32(count, _mm256_castps_si256(_mm256_cmp_ps(size.v, at, _CMP_GE_OQ)));
    }
    return {count};
  }
  __m256 edge[8];
};

struct Lanes {
  using Floats = avx2::Floats;
  using Ints = avx2::Ints;
  static constexpr int kLanes = 8;
  static constexpr bool kHoldsTables = false;  ///< whether registers hold the tables of all states of a rule
  static Floats all(float x) { return {_mm256_set1_ps(x)}; }
  static Ints all(std::int32_t x) { return {_mm256_set1_epi32(x)}; }
  static Ints index() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)}; }
  static Floats load(const float* from) { return {_mm256_loadu_ps(from)}; }
  static void store(float* to, Floats x) { _mm256_storeu_ps(to, x.v); }
  static Ints load_bytes(const std::uint8_t* from) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)))};
  }
  template <int kAdded>
  static void store_bytes(std::uint8_t* to, const Ints (&x)[4]) {
    const __m256i added = _mm256_set1_epi16(kAdded);
    const __m256i low = _mm256_add_epi16(_mm256_packs_epi32(x[0].v, x[1].v), added);
    const __m256i high = _mm256_add_epi16(_mm256_packs_epi32(x[2].v, x[3].v), added);
    const __m256i bytes = _mm256_packus_epi16(low, high);  // Packed within each half: 0 1 2 3 0 1 2 3.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(bytes, order));
  }
  static Ints load_halves(const std::uint16_t* from) {
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
  }
  static void store_halves(std::uint16_t* to, Ints x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves_of(x));
  }
  static Floats load_float16(const std::uint16_t* from) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
  }
  static void store_float16(std::uint16_t* to, Floats x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
  }
  template <std::size_t kCount>
  static void largest(const Floats (&x)[kCount], Floats (&to)[1]) {
    if constexpr (kCount == 8) {
      to[0] = largest_of_eight(x);
      return;
    }
    alignas(32) float all[kLanes] = {};
    for (std::size_t i = 0; i < kCount; ++i) {
      const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x[i].v), _mm256_extractf128_ps(x[i].v, 1));
      const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
      all[i] = _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
    }
    to[0] = load(all);
  }
  static void prefetch(const void* from, std::uintptr_t ahead) {
    _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(from) + ahead), _MM_HINT_T0);
  }

  /// Tables held in registers. A permutation selects by the low three bits of an index, a blend by the
  /// fourth.
  struct Table8 {
    explicit Table8(const float* from) : v(_mm256_loadu_ps(from)) {}
    Floats operator[](Ints i) const { return {_mm256_permutevar8x32_ps(v, i.v)}; }
    __m256 v;
  };
  struct Table16 {
    explicit Table16(const float* from) : low(_mm256_loadu_ps(from)), high(_mm256_loadu_ps(from + 8)) {}
    Floats operator[](Ints i) const {
      return {_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i.v), _mm256_permutevar8x32_ps(high, i.v),
                               fourth_bit(i))};
    }
    __m256 low, high;
  };
  struct Table9 {
    Table9() = default;
    explicit Table9(const float* from) : low(_mm256_loadu_ps(from)), last(_mm256_set1_ps(from[8])) {}
    Floats operator[](Ints i) const {
      return {_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i.v), last, fourth_bit(i))};
    }
    Table9 operator*(float x) const {
      Table9 product;
      product.low = _mm256_mul_ps(low, _mm256_set1_ps(x));
      product.last = _mm256_mul_ps(last, _mm256_set1_ps(x));
      return product;
    }
    __m256 low, last;
  };
  /// Entry 8 is stored in place of entry 0, whose index has the same low three bits.
  struct LineTable {
    LineTable() = default;
    explicit LineTable(const float* from)
        : v(_mm256_blend_ps(_mm256_loadu_ps(from), _mm256_set1_ps(from[8]), 1)) {}
    Floats operator[](Ints i) const { return {_mm256_permutevar8x32_ps(v, i.v)}; }
    LineTable operator*(float x) const {
      LineTable product;
      product.v = _mm256_mul_ps(v, _mm256_set1_ps(x));
      return product;
    }
    __m256 v;
  };
  static Floats zero_of_zero(Floats value, Ints code) {
    return {_mm256_castsi256_ps(_mm256_sign_epi32(_mm256_castps_si256(value.v), code.v))};
  }

  template <Regions::Parts kParts>
  using RegionSearch = std::conditional_t<kParts == Regions::Parts::kBinades, DecadeEdges, CountedEdges>;
  struct DecadeSearch {
    explicit DecadeSearch(const DynamicMap& map) : edges(map.regions) {}
    struct Region {
      Ints number, as_exponent;
    };
    Region operator()(Floats size) const {
      const Ints number = edges(size);
      return {number, shift_left<23>(number)};
    }
    DecadeEdges edges;
  };

 private:
  // Moves bit 3 to the sign bit, by which a blend selects.
  static __m256 fourth_bit(Ints i) { return _mm256_castsi256_ps(_mm256_slli_epi32(i.v, 28)); }
  // Merges vectors in pairs, each time halving the lanes of every input, until each of the eight has one
  // lane.
  static Floats largest_of_eight(const Floats (&x)[8]) {
    __m256 four[4];  // Each half of four[0] has lanes of the inputs 0 0 1 1.
    for (int i = 0; i < 4; ++i) {
      const __m256 a = x[2 * i].v;
      const __m256 b = x[2 * i + 1].v;
      four[i] = _mm256_max_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xEE));
    }
    __m256 two[2];  // Each half of two[0] has lanes of the inputs 0 1 2 3.
    for (int i = 0; i < 2; ++i) {
      two[i] = _mm256_max_ps(_mm256_shuffle_ps(four[2 * i], four[2 * i + 1], 0x88),
                             _mm256_shuffle_ps(four[2 * i], four[2 * i + 1], 0xDD));
    }
    return {_mm256_max_ps(_mm256_permute2f128_ps(two[0], two[1], 0x20),
                          _mm256_permute2f128_ps(two[0], two[1], 0x31))};
  }
  // Returns the low 16 bits of each lane.
  static __m128i halves_of(Ints x) {
    const __m256i low = _mm256_and_si256(x.v, _mm256_set1_epi32(0xFFFF));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    return _mm256_castsi256_si128(packed);
  }
};

}  // namespace reef::kernels::avx2
