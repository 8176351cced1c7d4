#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "kernels/optim_step.h"
#include "kernels/optim_step/maps.h"

/// How a tile of a state is read and written, by format. A codec is opened on a tile; load(i) decodes the
/// lanes from element i on; put(i, x) takes their new values. Formats with scales (kSettles) cannot write
/// before the tile's largest value is known. They take new values for lanes and three more after them, and
/// keep them: waiting(i) (of an unsigned state: its own business). close() ends the tile, and then
/// store(i, codes) writes, for lanes and three more, what code(find(i)) gives for each: in two halves, so
/// that a processor can be at the first of some lanes and the second of others. Values must not be NaN.
namespace reef::kernels {

/// One core's own prefetcher does not fill its line buffers here: 2 KiB ahead is worth a tenth.
template <class L>
void prefetch_ahead(const void* from) {
  L::prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(from) + 2048));
}

template <class L, int kBytes>
void prefetch_tile(const std::uint8_t* codes) {
  for (int i = 0; i < kBytes; i += 64) prefetch_ahead<L>(codes + i);
}

template <class L, bool kSigned>
class Float32Codec {
 public:
  using F = typename L::Floats;
  static constexpr bool kSettles = false;
  void open(const OptimState& state, std::int64_t tile, std::uint32_t) {
    values_ = reinterpret_cast<float*>(state.codes) + tile * kTileElements;
  }
  F load(int i) const {
    prefetch_ahead<L>(values_ + i);
    return L::load(values_ + i);
  }
  void put(int i, F x) { L::store(values_ + i, x); }

 private:
  float* values_ = nullptr;
};

/// Thirty-two bits for each lane, from the tile, the lane and a key: every rank and every run draws the same.
template <class L>
typename L::Ints random_bits(std::uint32_t key, int i) {
  using I = typename L::Ints;
  const auto all = [](std::uint32_t x) { return L::all(static_cast<std::int32_t>(x)); };
  I x = (L::index() + all(static_cast<std::uint32_t>(i) + key)) * all(0x9E3779B1U);
  x = (x ^ shift_right<16>(x)) * all(0x85EBCA6BU);  // MurmurHash3's finalizer
  x = (x ^ shift_right<13>(x)) * all(0xC2B2AE35U);
  return x ^ shift_right<16>(x);
}

/// x as bfloat16, up or down by chance so that its mean is x. Not for NaN.
template <class L>
typename L::Ints to_bfloat16_stochastic(typename L::Floats x, typename L::Ints random) {
  // At the end of the range a carry would make an infinity.
  const auto bits = bits_of(min(max(x, L::all(-0x1.FEp127F)), L::all(0x1.FEp127F)));
  return shift_right<16>(bits + (random & L::all(0xFFFF)));
}

/// Rounded by chance: a moving average that changes by less than half of the last place would stand still.
template <class L, bool kSigned>
class BFloat16Codec {
 public:
  using F = typename L::Floats;
  static constexpr bool kSettles = false;
  void open(const OptimState& state, std::int64_t tile, std::uint32_t key) {
    values_ = reinterpret_cast<std::uint16_t*>(state.codes) + tile * kTileElements;
    key_ = key;
  }
  F load(int i) const {
    prefetch_ahead<L>(values_ + i);
    return floats_of_bits(shift_left<16>(L::load_halves(values_ + i)));
  }
  void put(int i, F x) {
    L::store_halves(values_ + i, to_bfloat16_stochastic<L>(x, random_bits<L>(key_, i)));
  }

 private:
  std::uint16_t* values_ = nullptr;
  std::uint32_t key_ = 0;
};

/// The new values of a tile, kept until the largest of their block is known.
template <class L, int kBlockElements, bool kSigned>
class Waiting {
 public:
  using F = typename L::Floats;
  static constexpr int kBlocks = kTileElements / kBlockElements;

  void put(int i, const F (&x)[4]) {
    for (int k = 0; k < 4; ++k) L::store(values_ + i + k * L::kLanes, x[k]);
    for (int k = 0; k < 4; k += kPartLanes) {
      F largest = kSigned ? abs(x[k]) : x[k];
      for (int m = 1; m < kPartLanes; ++m)
        largest = kSigned ? max_size(largest, x[k + m]) : max(largest, x[k + m]);
      largest_[i / kPart + k / kPartLanes] = largest;
    }
  }
  F operator[](int i) const { return L::load(values_ + i); }

  /// The tile is whole. The largest value of each block, rounded up by `round`, is its scale. Values will be
  /// counted in so many units of it. An infinity (a square that overflowed) becomes the largest float.
  template <class Round>
  void close(float units, const Round& round) {
    constexpr int kOfBlock = kBlockElements / kPart;
    F of_blocks[kBlocks];
    for (int block = 0; block < kBlocks; ++block) {
      of_blocks[block] = largest_[block * kOfBlock];
      for (int k = 1; k < kOfBlock; ++k) {
        of_blocks[block] = max(of_blocks[block], largest_[block * kOfBlock + k]);
      }
    }
    F packed[kPacked];
    L::largest(of_blocks, packed);
    for (int i = 0; i < kPacked; ++i) {
      if (!all(L::all(FLT_MAX) >= packed[i])) packed[i] = take_infinities(packed[i]);
      const F scale = round(packed[i]);
      L::store(scales_ + i * L::kLanes, scale);
      L::store(units_ + i * L::kLanes, L::all(units) / max(scale, L::all(FLT_MIN * units)));
    }
  }
  const float* scales() const { return scales_; }
  /// In units of a part of its block's scale.
  F in_units(int i) const { return (*this)[i] * units(i); }
  F units(int i) const { return L::all(units_[i / kBlockElements]); }

 private:
  // Largest values are kept for parts of blocks: four lanes, or less.
  static constexpr int kPart = kBlockElements < 4 * L::kLanes ? kBlockElements : 4 * L::kLanes;
  static constexpr int kPartLanes = kPart / L::kLanes;
  // Scales are made for as many blocks at once as there are lanes.
  static constexpr int kPacked = (kBlocks + L::kLanes - 1) / L::kLanes;

  F take_infinities(F largest) {
    const F most = L::all(FLT_MAX);
    for (int i = 0; i < kTileElements; i += L::kLanes) {
      L::store(values_ + i, max(min((*this)[i], most), L::all(-FLT_MAX)));
    }
    return min(largest, most);
  }

  alignas(64) float values_[kTileElements];
  F largest_[kTileElements / kPart];
  alignas(64) float scales_[kPacked * L::kLanes];
  alignas(64) float units_[kPacked * L::kLanes];
};

/// The arithmetic of the dynamic map, for values in [-1, 1], and what rounding makes of 1.
template <class L, bool kSigned>
struct DynamicCode {
  using F = typename L::Floats;
  using I = typename L::Ints;
  using Table16 = typename L::Table16;
  explicit DynamicCode(const DynamicMap& map)
      : shift(L::all(map.shift)),
        base(map.base),
        width(map.width),
        edge(map.edge),
        region(map.region),
        offset(map.offset),
        gain(map.gain),
        last(map.last) {}
  static const DynamicMap& map() { return kSigned ? signed_dynamic_map() : unsigned_dynamic_map(); }

  /// Of base and width times a scale.
  F decode(I code, const Table16& bases, const Table16& widths) const {
    const F number = to_floats(code);
    if constexpr (kSigned) {
      const F rank = number - L::all(127.0F);
      return copysign(value(abs(rank) + shift, bases, widths), rank);
    }
    return value(number + shift, bases, widths);
  }

  struct Found {
    F x, size;
    I where;
  };
  Found find(F x) const {
    const F least = L::all(0x1p-31F);
    const F above = kSigned ? max_size(least, x) : max(x, least);
    const F size = kSigned ? above : x;                // below the least, a signed value's code is 0 anyway
    const I binade = shift_right<23>(bits_of(above));  // by its low five bits
    return {x, size, add_where(size >= edge[binade], bits_of(region[binade]), L::all(1))};
  }
  /// Less 127 if signed.
  I code(const Found& found) const {
    const F rank = min(fma(found.size, gain[found.where], offset[found.where]), last[found.where]);
    return to_ints(kSigned ? copysign(rank, found.x) : rank);
  }

  F shift;
  Table16 base, width;

 private:
  F value(F shifted_rank, const Table16& bases, const Table16& widths) const {
    const I exponent = shift_right<23>(bits_of(shifted_rank));
    return fma(widths[exponent], shifted_rank, bases[exponent]);
  }

  typename L::Table32 edge, region;
  Table16 offset, gain, last;
};

template <class L, bool kSigned>
class Int8Codec {
 public:
  using F = typename L::Floats;
  static constexpr bool kSettles = true;
  void open(const OptimState& state, std::int64_t tile, std::uint32_t) {
    codes_ = reinterpret_cast<std::uint8_t*>(state.codes) + tile * kTileElements;
    scale_ = reinterpret_cast<float*>(state.scales) + tile;
    prefetch_tile<L, kTileElements>(codes_);
    base_ = code_.base * *scale_;
    width_ = code_.width * *scale_;
  }
  F load(int i) const { return code_.decode(L::load_bytes(codes_ + i), base_, width_); }
  void put(int i, const F (&x)[4]) { new_.put(i, x); }
  F waiting(int i) const { return new_[i]; }
  void close() {
    new_.close(1, [](F largest) { return largest; });
    *scale_ = *new_.scales();
  }
  auto find(int i) const { return code_.find(new_.in_units(i)); }
  template <class Found>
  auto code(const Found& found) const {
    return code_.code(found);
  }
  void store(int i, const typename L::Ints (&codes)[4]) {  // not -1, but 0
    L::template store_bytes<kSigned ? 127 : 0>(codes_ + i, codes);
  }

 private:
  DynamicCode<L, kSigned> code_{DynamicCode<L, kSigned>::map()};
  typename L::Table16 base_{code_.base}, width_{code_.width};  ///< times the tile's scale
  std::uint8_t* codes_ = nullptr;
  float* scale_ = nullptr;
  Waiting<L, kTileElements, kSigned> new_;
};

/// Two codes a byte: of elements 0 to 127 of a tile in the low halves, of 128 to 255 in the high ones, so
/// that each half is a block of its own.
template <class L, bool kSigned>
class Int4Codec {
 public:
  using F = typename L::Floats;
  static constexpr bool kSettles = true;
  using I = typename L::Ints;
  static constexpr int kBlock = kTileElements / 2;
  void open(const OptimState& state, std::int64_t tile, std::uint32_t) {
    codes_ = reinterpret_cast<std::uint8_t*>(state.codes) + tile * kBlock;
    scales_ = reinterpret_cast<float*>(state.scales) + tile * 2;
    prefetch_tile<L, kBlock>(codes_);
  }
  F load(int i) const {
    const bool low = i < kBlock;
    const I bytes = L::load_bytes(codes_ + (low ? i : i - kBlock));
    return decode(low ? bytes & L::all(15) : shift_right<4>(bytes), scales_[low ? 0 : 1]);
  }
  void put(int i, const F (&x)[4]) { new_.put(i, x); }
  F waiting(int i) const { return new_[i]; }
  void close() {
    new_.close(kSigned ? 1 : 16, [](F largest) { return largest; });
    std::memcpy(scales_, new_.scales(), 2 * sizeof(float));
  }
  I find(int i) const {
    if (i >= kBlock) return L::all(0);
    return encode(i) | shift_left<4>(encode(i + kBlock));
  }
  I code(I codes) const { return codes; }
  void store(int i, const I (&codes)[4]) {
    if (i < kBlock) L::template store_bytes<0>(codes_ + i, codes);
  }

 private:
  F decode(I code, float scale) const {
    if constexpr (kSigned) return value_[code] * L::all(scale);
    // A sixteenth to sixteen sixteenths: no code stands for zero, for a step divides by the root
    // (section 4.1).
    const F part = L::all(scale * (1.0F / 16));
    return fma(to_floats(code), part, part);
  }
  I encode(int i) const {
    if constexpr (kSigned) {
      const F x = new_.in_units(i);
      const F size = abs(x);
      const I quarter =
          shift_right<21>(bits_of(max(size, L::all(DynamicMap4::kLeast))));  // by its low five bits
      const F one = L::all(1.0F);
      const F from = rank_[quarter];
      const F rank = select(size >= edge_[quarter], from + one, from);
      return max(to_ints(copysign(rank, x)) + L::all(7), L::all(0));
    }
    return to_ints(fma(new_[i], new_.units(i), L::all(-0.5F)));
  }

  typename L::Table16 value_{signed_dynamic_map4().value};
  typename L::Table32 edge_{signed_dynamic_map4().edge};
  typename L::Table32 rank_{signed_dynamic_map4().rank};
  std::uint8_t* codes_ = nullptr;
  float* scales_ = nullptr;
  Waiting<L, kBlock, kSigned> new_;
};

/// 1 / b for b from kOver / kUnder to twice that, without a processor's divider: the cubic that is nearest
/// throughout (1/577 off), and one of Newton's steps: at most 3.1e-6 less than 1 / b, and never more.
template <class L, int kOver, int kUnder = 1>
typename L::Floats inverse_within(typename L::Floats b) {
  constexpr double kUnit = static_cast<double>(kUnder) / kOver;
  const auto all = [](double x) { return L::all(static_cast<float>(x / 577 * kUnit)); };
  auto inverse = fma(b, all(-128 * kUnit * kUnit * kUnit), all(768 * kUnit * kUnit));
  inverse = fma(inverse, b, all(-1696 * kUnit));
  inverse = fma(inverse, b, all(1632));
  return fma(fnma(b, inverse, L::all(1.0F)), inverse, inverse);
}

/// FlashOptim's companding (2602.23349, section 3.2): a first moment through 2x / (1 + |x|), a second moment
/// through its root, in blocks of 32. Unlike there, the scale is a bfloat16 (a float16 underflows below
/// 6e-8), and a second moment that is not zero never becomes zero.
template <class L, bool kSigned>
class Companded8Codec {
 public:
  using F = typename L::Floats;
  static constexpr bool kSettles = true;
  using I = typename L::Ints;
  static constexpr int kBlock = 32;
  static constexpr int kBlocks = kTileElements / kBlock;
  void open(const OptimState& state, std::int64_t tile, std::uint32_t) {
    codes_ = reinterpret_cast<std::uint8_t*>(state.codes) + tile * kTileElements;
    scales_ = reinterpret_cast<std::uint16_t*>(state.scales) + tile * kBlocks;
    prefetch_tile<L, kTileElements>(codes_);
    for (int block = 0; block < kBlocks; ++block) {
      unit_[block] = kSigned ? scale_of(scales_[block]) : scale_of(scales_[block]) * (1.0F / 255);
    }
  }
  F load(int i) const {
    const I code = L::load_bytes(codes_ + i);
    const F unit = L::all(unit_[i / kBlock]);
    if constexpr (kSigned) {
      const F number = to_floats(code) - L::all(128.0F);
      return number / (L::all(254.0F) - abs(number)) * unit;  // the divider is idle here
    }
    const F root = to_floats(code) * unit;
    return root * root;
  }
  void put(int i, const F (&x)[4]) {
    if constexpr (kSigned) {
      new_.put(i, x);
    } else {
      F roots[4];  // at most a bfloat16: the scale is not rounded up to 2^64
      for (int k = 0; k < 4; ++k) roots[k] = min(sqrt(x[k]), L::all(0x1.FEP63F));
      new_.put(i, roots);
    }
  }
  F waiting(int i) const { return new_[i]; }
  void close() {
    new_.close(kSigned ? 1 : 255, [](F largest) {
      const I up = shift_left<16>(shift_right<16>(bits_of(largest) + L::all(0xFFFF)));
      return floats_of_bits(min(up, L::all(0x7F7F0000)));
    });
    for (int block = 0; block < kBlocks; ++block) scales_[block] = upper_half(new_.scales()[block]);
  }
  F find(int i) const { return new_.in_units(i); }
  I code(F x) const {
    if constexpr (kSigned) {
      const F part = L::all(1.0F / 254);
      return rounded(x * inverse_within<L, 1, 254>(fma(abs(x), part, part)));
    }
    return max(rounded(x), min(bits_of(x), L::all(1)));  // not 0 unless x is
  }
  void store(int i, const I (&codes)[4]) { L::template store_bytes<kSigned ? 128 : 0>(codes_ + i, codes); }

 private:
  static float scale_of(std::uint16_t scale) {
    const std::uint32_t bits = std::uint32_t{scale} << 16;
    float value = 0;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  static std::uint16_t upper_half(float scale) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &scale, sizeof bits);
    return static_cast<std::uint16_t>(bits >> 16);
  }

  std::uint8_t* codes_ = nullptr;
  std::uint16_t* scales_ = nullptr;
  float unit_[kBlocks];  ///< of what is decoded
  Waiting<L, kBlock, kSigned> new_;
};

}  // namespace reef::kernels
