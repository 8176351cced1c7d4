#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "kernels/optim_step.h"
#include "kernels/optim_step/maps.h"

/// How a tile of a state is read and written, by format. A codec is opened on a tile; load(i) decodes the
/// lanes from element i on; put(i, x) takes their new values. Formats with scales (kSettles) cannot write
/// before the tile's largest value is known: close() ends the tile, and then store(i, codes) does, for lanes
/// and three more after them, what code(find(i)) gives for each: in two halves, so that a processor can be at
/// the first of some lanes and the second of others.
/// Values must not be NaN.
namespace reef::kernels {

/// One core's own prefetcher does not fill its line buffers here: 2 KiB ahead is worth a tenth.
template <class L>
void prefetch_ahead(const void* from) {
  L::prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(from) + 2048));
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

/// The new values of a tile wait until the largest of their block is known.
template <class L, int kBlockElements, bool kSigned>
class Waiting {
 public:
  using F = typename L::Floats;
  static constexpr int kBlocks = kTileElements / kBlockElements;

  void put(int i, F x) {
    L::store(values_ + i, x);
    F& largest = largest_[i / kBlockElements];
    largest = max(largest, kSigned ? abs(x) : x);
  }
  /// The tile is whole. Calls `scaled` with the number of each block and its largest value: it gives the
  /// scale to divide by. An infinity (a square that overflowed) becomes the largest float.
  template <class Scaled>
  void close(const Scaled& scaled) {
    float largest[kBlocks];
    L::largest(largest_, largest);
    for (int block = 0; block < kBlocks; ++block) {
      largest_[block] = L::all(0.0F);
      if (!(largest[block] <= FLT_MAX)) largest[block] = without_infinities(block);
      const float scale = scaled(block, largest[block]);
      inverse_[block] = 1 / (scale > FLT_MIN ? scale : FLT_MIN);
    }
  }
  /// Divided by its block's scale.
  F value(int i) const { return L::load(values_ + i) * L::all(inverse_[i / kBlockElements]); }

 private:
  float without_infinities(int block) {
    const F most = L::all(FLT_MAX);
    for (int i = block * kBlockElements; i < (block + 1) * kBlockElements; i += L::kLanes) {
      L::store(values_ + i, max(min(L::load(values_ + i), most), L::all(-FLT_MAX)));
    }
    return FLT_MAX;
  }

  alignas(64) float values_[kTileElements];
  F largest_[kBlocks] = {};
  float inverse_[kBlocks];
};

/// The arithmetic of the dynamic map, for values in [-1, 1], and what rounding makes of 1.
template <class L, bool kSigned>
struct DynamicCode {
  using F = typename L::Floats;
  using I = typename L::Ints;
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

  F decode(I code) const {
    const F number = to_floats(code);
    if constexpr (kSigned) {
      const F rank = number - L::all(127.0F);
      return copysign(value(abs(rank) + shift), rank);
    }
    return value(number + shift);
  }
  I encode(F x, I where) const {
    if constexpr (kSigned) {
      return to_ints(copysign(rank(abs(x), where), x)) + L::all(127);
    }
    return to_ints(rank(x, where));
  }

  F value(F shifted_rank) const {
    const I exponent = shift_right<23>(bits_of(shifted_rank));
    return fma(width[exponent], shifted_rank, base[exponent]);
  }
  /// Of the value's size.
  I region_of(F x) const {
    const F size = kSigned ? abs(x) : x;
    const I binade = shift_right<23>(bits_of(max(size, L::all(0x1p-31F))));  // by its low five bits
    return add_where(size >= edge[binade], bits_of(region[binade]), L::all(1));
  }
  F rank(F size, I where) const { return min(fma(size, gain[where], offset[where]), last[where]); }

  F shift;
  typename L::Table16 base, width;
  typename L::Table32 edge, region;
  typename L::Table16 offset, gain, last;
};

template <class L, bool kSigned>
class Int8Codec {
 public:
  using F = typename L::Floats;
  static constexpr bool kSettles = true;
  void open(const OptimState& state, std::int64_t tile, std::uint32_t) {
    codes_ = reinterpret_cast<std::uint8_t*>(state.codes) + tile * kTileElements;
    scale_ = reinterpret_cast<float*>(state.scales) + tile;
  }
  F load(int i) const {
    prefetch_ahead<L>(codes_ + i);
    return code_.decode(L::load_bytes(codes_ + i)) * L::all(*scale_);
  }
  void put(int i, F x) { new_.put(i, x); }
  void close() {
    new_.close([&](int, float largest) { return *scale_ = largest; });
  }
  struct Found {
    F x;
    typename L::Ints where;
  };
  Found find(int i) const {
    const F x = new_.value(i);
    return {x, code_.region_of(x)};
  }
  typename L::Ints code(const Found& found) const { return code_.encode(found.x, found.where); }
  void store(int i, const typename L::Ints (&codes)[4]) { L::store_bytes(codes_ + i, codes); }  // no -1: 0

 private:
  DynamicCode<L, kSigned> code_{DynamicCode<L, kSigned>::map()};
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
  }
  F load(int i) const {
    const bool low = i < kBlock;
    prefetch_ahead<L>(codes_ + i / 2);
    const I bytes = L::load_bytes(codes_ + (low ? i : i - kBlock));
    return decode(low ? bytes & L::all(15) : shift_right<4>(bytes)) * L::all(scales_[low ? 0 : 1]);
  }
  void put(int i, F x) { new_.put(i, x); }
  void close() {
    new_.close([&](int block, float largest) { return scales_[block] = largest; });
  }
  I find(int i) const {
    if (i >= kBlock) return L::all(0);
    return encode(new_.value(i)) | shift_left<4>(encode(new_.value(i + kBlock)));
  }
  I code(I codes) const { return codes; }
  void store(int i, const I (&codes)[4]) {
    if (i < kBlock) L::store_bytes(codes_ + i, codes);
  }

 private:
  F decode(I code) const {
    if constexpr (kSigned) return value_[code];
    // A sixteenth to sixteen sixteenths: no code stands for zero, for a step divides by the root
    // (section 4.1).
    return fma(to_floats(code), L::all(1.0F / 16), L::all(1.0F / 16));
  }
  I encode(F x) const {
    if constexpr (kSigned) {
      const F size = abs(x);
      const I quarter = max(min(shift_right<21>(bits_of(size)), L::all(507)) - L::all(476), L::all(0));
      const F one = L::all(1.0F);
      const F from = rank_[quarter];
      const F rank = select(size >= edge_[quarter], from + one, from);
      return max(to_ints(copysign(rank, x)) + L::all(7), L::all(0));
    }
    return to_ints(min(max(fma(x, L::all(16.0F), L::all(-0.5F)), L::all(0.0F)), L::all(15.0F)));
  }

  typename L::Table16 value_{signed_dynamic_map4().value};
  typename L::Table32 edge_{signed_dynamic_map4().edge};
  typename L::Table32 rank_{signed_dynamic_map4().rank};
  std::uint8_t* codes_ = nullptr;
  float* scales_ = nullptr;
  Waiting<L, kBlock, kSigned> new_;
};

/// a / b for b from `kFrom` to twice that, without a processor's divider: a quadratic guess of 1 / b, two of
/// Newton's steps, and a correction. As the division rounds for whatever companding divides (all was tried).
template <class L, int kFrom>
typename L::Floats divide_within(typename L::Floats a, typename L::Floats b) {
  constexpr double kUnit = 1.0 / kFrom;
  const auto one = L::all(1.0F);
  auto inverse = fma(b, L::all(static_cast<float>(32.0 / 99 * kUnit * kUnit * kUnit)),
                     L::all(static_cast<float>(-16.0 / 11 * kUnit * kUnit)));
  inverse = fma(inverse, b, L::all(static_cast<float>(70.0 / 33 * kUnit)));
  inverse = fma(fnma(b, inverse, one), inverse, inverse);
  inverse = fma(fnma(b, inverse, one), inverse, inverse);
  const auto quotient = a * inverse;
  return fma(fnma(quotient, b, a), inverse, quotient);
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
    for (int block = 0; block < kBlocks; ++block) {
      unit_[block] = kSigned ? scale_of(scales_[block]) : scale_of(scales_[block]) * (1.0F / 255);
    }
  }
  F load(int i) const {
    prefetch_ahead<L>(codes_ + i);
    const I code = L::load_bytes(codes_ + i);
    const F unit = L::all(unit_[i / kBlock]);
    if constexpr (kSigned) {
      const F number = to_floats(code) - L::all(128.0F);
      return divide_within<L, 127>(number, L::all(254.0F) - abs(number)) * unit;
    }
    const F root = to_floats(code) * unit;
    return root * root;
  }
  void put(int i, F x) {
    if constexpr (kSigned) {
      new_.put(i, x);
    } else {
      new_.put(i, min(sqrt(x), L::all(0x1.FEP63F)));  // a bfloat16: the scale is not rounded up to 2^64
    }
  }
  void close() {
    new_.close([&](int block, float largest) { return scale_of(scales_[block] = scale_for(largest)); });
  }
  F find(int i) const { return new_.value(i); }
  void store(int i, const I (&codes)[4]) { L::store_bytes(codes_ + i, codes); }
  I code(F x) const {
    if constexpr (kSigned) {
      const F size = abs(x);
      const F companded = divide_within<L, 1>(size * L::all(254.0F), L::all(1.0F) + size);
      return rounded(copysign(companded, x)) + L::all(128);
    }
    return max(rounded(x * L::all(255.0F)), min(bits_of(x), L::all(1)));  // not 0 unless x is
  }

 private:
  static float scale_of(std::uint16_t scale) {
    const std::uint32_t bits = std::uint32_t{scale} << 16;
    float value = 0;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  // The least bfloat16 that is not below.
  static std::uint16_t scale_for(float largest) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &largest, sizeof bits);
    const std::uint32_t up = (bits + 0xFFFF) >> 16;
    return static_cast<std::uint16_t>(up < 0x7F80 ? up : 0x7F7F);
  }

  std::uint8_t* codes_ = nullptr;
  std::uint16_t* scales_ = nullptr;
  float unit_[kBlocks];  ///< of what is decoded
  Waiting<L, kBlock, kSigned> new_;
};

}  // namespace reef::kernels
