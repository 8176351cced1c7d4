#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/optim_step/maps.h"

/// Sixteen lanes of AVX-512 (F, BW, DQ, VL), with the functions of lanes_scalar.h.
namespace reef::kernels::avx512 {

struct Floats {
  __m512 v;
};
struct Ints {
  __m512i v;
};
struct Mask {
  __mmask16 v;
};

inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats fnma(Floats a, Floats b, Floats c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
inline Floats sqrt(Floats a) { return {_mm512_sqrt_ps(a.v)}; }
inline Floats abs(Floats a) { return {_mm512_abs_ps(a.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats max_size(Floats size, Floats x) { return {_mm512_range_ps(size.v, x.v, 0x0B)}; }
inline Mask operator>=(Floats a, Floats b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
inline Mask operator>(Floats a, Floats b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
inline bool all(Mask m) { return m.v == 0xFFFF; }
inline Floats select(Mask m, Floats a, Floats b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
inline Floats copysign(Floats size, Floats sign) {
  const __m512i bits = _mm512_set1_epi32(INT32_MIN);
  return {_mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(bits, _mm512_castps_si512(sign.v), _mm512_castps_si512(size.v), 0xCA))};
}

inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Ints operator&(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Ints operator|(Ints a, Ints b) { return {_mm512_or_si512(a.v, b.v)}; }
inline Ints operator^(Ints a, Ints b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline Ints operator*(Ints a, Ints b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline Ints min(Ints a, Ints b) { return {_mm512_min_epi32(a.v, b.v)}; }
inline Ints max(Ints a, Ints b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline Ints abs(Ints a) { return {_mm512_abs_epi32(a.v)}; }
inline Mask operator>(Ints a, Ints b) { return {_mm512_cmpgt_epi32_mask(a.v, b.v)}; }
inline Ints select(Mask m, Ints a, Ints b) { return {_mm512_mask_blend_epi32(m.v, b.v, a.v)}; }
/// Returns a + b in the lanes of `m`, and a in all others.
inline Ints add_where(Mask m, Ints a, Ints b) { return {_mm512_mask_add_epi32(a.v, m.v, a.v, b.v)}; }
template <int kBits>
Ints shift_right(Ints a) {
  return {_mm512_srli_epi32(a.v, kBits)};
}
template <int kBits>
Ints shift_left(Ints a) {
  return {_mm512_slli_epi32(a.v, kBits)};
}
inline Ints bits_of(Floats a) { return {_mm512_castps_si512(a.v)}; }
inline Floats floats_of_bits(Ints a) { return {_mm512_castsi512_ps(a.v)}; }
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
/// Rounds towards zero.
inline Ints to_ints(Floats a) { return {_mm512_cvttps_epi32(a.v)}; }
inline Ints sign_of(Floats a) {
  return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(INT32_MIN))};
}
inline Floats operator^(Floats size, Ints sign) {
  return {_mm512_xor_ps(size.v, _mm512_castsi512_ps(sign.v))};
}
inline Ints with_sign(Ints a, Floats sign) {
  const __mmask16 minus = _mm512_movepi32_mask(_mm512_castps_si512(sign.v));
  return {_mm512_mask_sub_epi32(a.v, minus, _mm512_setzero_si512(), a.v)};
}
/// Rounds to nearest, ties to even.
inline Ints rounded(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }

struct Lanes {
  using Floats = avx512::Floats;
  using Ints = avx512::Ints;
  static constexpr int kLanes = 16;
  static constexpr bool kHoldsTables = true;  ///< whether registers hold the tables of all states of a rule
  static Floats all(float x) { return {_mm512_set1_ps(x)}; }
  static Ints all(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
  /// Returns 0, 1, 2, ...
  static Ints index() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
  static Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
  static void store(float* to, Floats x) { _mm512_storeu_ps(to, x.v); }
  static Ints load_bytes(const std::uint8_t* from) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
  }
  template <int kAdded>
  static void store_bytes(std::uint8_t* to, const Ints (&x)[4]) {
    const __m512i added = _mm512_set1_epi16(kAdded);
    const __m512i low = _mm512_add_epi16(_mm512_packs_epi32(x[0].v, x[1].v), added);
    const __m512i high = _mm512_add_epi16(_mm512_packs_epi32(x[2].v, x[3].v), added);
    const __m512i bytes = _mm512_packus_epi16(low, high);  // Packed within each 128-bit quarter.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
  }
  static Ints load_halves(const std::uint16_t* from) {
    return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
  }
  static void store_halves(std::uint16_t* to, Ints x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(x.v));
  }
  static Floats load_float16(const std::uint16_t* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
  }
  static void store_float16(std::uint16_t* to, Floats x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
  }
  template <std::size_t kCount>
  static void largest(const Floats (&x)[kCount], Floats (&to)[1]) {
    if constexpr (kCount == 8) {
      to[0] = largest_of_eight(x);
    } else {
      for (std::size_t i = 0; i < kCount; ++i) {  // The last result fills all lanes after it.
        const auto from_here = static_cast<__mmask16>(0xFFFF << i);
        to[0].v = _mm512_mask_mov_ps(to[0].v, from_here, _mm512_set1_ps(_mm512_reduce_max_ps(x[i].v)));
      }
    }
  }
  static void prefetch(const void* from, std::uintptr_t ahead) {
    _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(from) + ahead), _MM_HINT_T0);
  }

  /// Tables held in registers.
  struct Table16 {
    Table16() = default;
    explicit Table16(const float* from) : v(_mm512_loadu_ps(from)) {}
    Floats operator[](Ints i) const { return {_mm512_permutexvar_ps(i.v, v)}; }
    Table16 operator*(float x) const { return Table16(_mm512_mul_ps(v, _mm512_set1_ps(x))); }

   private:
    explicit Table16(__m512 from) : v(from) {}
    __m512 v;
  };
  using Table9 = Table16;
  using LineTable = Table9;
  static Floats zero_of_zero(Floats value, Ints) { return value; }
  struct Table8 {
    explicit Table8(const float* from) : v(_mm512_broadcast_f32x8(_mm256_loadu_ps(from))) {}
    Floats operator[](Ints i) const { return {_mm512_permutexvar_ps(i.v, v)}; }
    __m512 v;
  };
  struct Table32 {
    explicit Table32(const float* from) : low(_mm512_loadu_ps(from)), high(_mm512_loadu_ps(from + 16)) {}
    /// Selects by the low five bits of an index.
    Floats operator[](Ints i) const { return {_mm512_permutex2var_ps(low, i.v, high)}; }
    __m512 low, high;
  };

  template <Regions::Parts kParts>
  struct RegionSearch {
    explicit RegionSearch(const Regions& of) : edge(of.edge_in_part), region(of.region_of_part) {}
    Ints operator()(Floats size) const {
      constexpr bool kBinades = kParts == Regions::Parts::kBinades;
      const Ints bits = bits_of(max(size, all(kBinades ? Regions::kLeastBinade : Regions::kLeastQuarter)));
      const Ints part = kBinades ? shift_right<23>(bits) : shift_right<21>(bits);
      return add_where(size >= edge[part], bits_of(region[part]), all(1));
    }
    Table32 edge, region;
  };
  struct DecadeSearch {
    explicit DecadeSearch(const DynamicMap& map) : jump(map.jump) {}
    struct Region {
      Ints number, as_exponent;
    };
    Region operator()(Floats size) const {
      const Ints bits = bits_of(size);
      const Ints jumped = bits + bits_of(jump[shift_right<23>(bits)]);
      return {shift_right<23>(jumped), jumped & all(-0x800000)};
    }
    Table32 jump;
  };

 private:
  // Merges vectors in pairs, each time halving the lanes of every input, until each of the eight has two
  // lanes.
  static Floats largest_of_eight(const Floats (&x)[8]) {
    __m512 two[4];
    for (int i = 0; i < 4; ++i) {
      const __m512 a = x[2 * i].v;
      const __m512 b = x[2 * i + 1].v;
      two[i] = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    }
    __m512 four[2];
    for (int i = 0; i < 2; ++i) {
      four[i] = _mm512_max_ps(_mm512_shuffle_f32x4(two[2 * i], two[2 * i + 1], 0x88),
                              _mm512_shuffle_f32x4(two[2 * i], two[2 * i + 1], 0xDD));
    }
    __m512 eight = _mm512_max_ps(_mm512_shuffle_ps(four[0], four[1], 0x44),
                                 _mm512_shuffle_ps(four[0], four[1], 0xEE));  // Quarter i: i i i+4 i+4.
    eight = _mm512_max_ps(eight, _mm512_permute_ps(eight, 0xB1));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    return {_mm512_permutexvar_ps(order, eight)};
  }
};

}  // namespace reef::kernels::avx512
