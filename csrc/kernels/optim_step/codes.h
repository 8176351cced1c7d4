#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/lane.h"
#include "kernels/optim_step/maps.h"

/// The formulas that map codes to values and values to codes in each format, for any kind of lanes, CUDA
/// threads included. codecs.h and warp/state.h define where codes are stored.
///
/// A code stands for a value in units of its block's scale: decode(code, unit(scale)). To encode a new value
/// x, kept(x) is stored until its block is complete; the block's scale is scale(m), where m is the largest
/// magnitude of kept(x); and the code is code(find(kept(x), kUnits / scale)) + kAdded. find() and code() are
/// separate so that a processor can work on the first for some lanes and on the second for others. Values
/// must not be NaN.
namespace reef::kernels {

/// The part that formats share whose scales are float32: a block's scale is its largest magnitude.
template <class L, int kElements, int kCodeBits>
struct Float32Scaled {
  using F = typename L::Floats;
  using I = typename L::Ints;
  using Scale = float;
  static constexpr int kBlock = kElements;
  static constexpr int kBits = kCodeBits;
  static constexpr bool kKeepsValues = true;  ///< whether kept(x) is x
  REEF_LANE static F kept(F x) { return x; }
  REEF_LANE static F scale(F largest) { return largest; }
};
template <class L>
using Int8Scaled = Float32Scaled<L, 256, 8>;
template <class L>
using Int4Scaled = Float32Scaled<L, 128, 4>;

/// Decodes with piecewise linear functions: a value is a linear function of its rank, and the exponent of the
/// rank selects the function.
template <class L, class Table>
class RankLines {
 public:
  using F = typename L::Floats;
  struct Unit {
    Table base, width;
  };
  template <class Map>
  REEF_LANE explicit RankLines(const Map& map) : base_(map.base), width_(map.width) {}

  REEF_LANE Unit unit(float scale) const { return {base_ * scale, width_ * scale}; }
  /// Line 0 is the one of ranks with the biased exponent kFirstExponent.
  template <int kFirstExponent>
  REEF_LANE static F value(F shifted_rank, const Unit& unit) {
    auto line = shift_right<23>(bits_of(shifted_rank));
    if constexpr (kFirstExponent % 16 != 0) line = line - L::all(kFirstExponent);
    return fma(unit.width[line], shifted_rank, unit.base[line]);
  }

 private:
  Table base_, width_;
};

/// 8-bit codes on the dynamic map (maps.h), by arithmetic in as few operations as possible: a step that reads
/// and writes 16 bytes per element is bound by computation.
template <class L, bool kSigned>
class Int8Code : public Int8Scaled<L> {
 public:
  using F = typename L::Floats;
  using I = typename L::Ints;
  using Lines = RankLines<L, typename L::LineTable>;
  using Unit = typename Lines::Unit;
  using Map = DynamicMap;
  static constexpr bool kLooksUp = true;  ///< whether it uses tables
  static constexpr float kUnits = 1;
  static constexpr int kAdded = kSigned ? 127 : -1;
  static const Map& map() { return kSigned ? signed_dynamic_map() : unsigned_dynamic_map(); }

  REEF_LANE explicit Int8Code(const Map& map) : lines_(map), decades_(map), gain_(map.gain) {}

  REEF_LANE Unit unit(float scale) const { return lines_.unit(scale); }
  REEF_LANE F decode(I code, const Unit& unit) const {
    constexpr float k = DynamicMap::multiple(kSigned);
    constexpr float kOne = k * 0x1p23F;  // Setting its last bits to a code adds k times the code.
    const F number = floats_of_bits(code | bits_of(L::all(kOne)));
    if constexpr (kSigned) {
      const F minus = L::all(kOne + k * kAdded) - number;
      const I exponent = shift_right<23>(bits_of(minus));
      return fnma(unit.width[exponent], minus, unit.base[exponent] ^ sign_of(minus));
    } else {
      const F value = Lines::template value<128>(number - L::all(kOne + k * kAdded), unit);
      return L::zero_of_zero(value, code);
    }
  }

  struct Found {
    F x, size;
    typename L::DecadeSearch::Region region;
  };
  REEF_LANE Found find(F kept, F units) const {
    const F x = kept * units;
    const F least = L::all(DynamicMap::kLeast);
    const F size = kSigned ? max_size(least, x) : floats_of_bits(max(bits_of(x), bits_of(least)));
    return {x, size, decades_(size)};
  }
  REEF_LANE I code(const Found& found) const {
    constexpr float kPart = DynamicMap::part(kSigned);
    const F gain = gain_[found.region.number];
    const F part = fma(found.size, gain, L::all(8.0F / 9 * kPart));
    const I below_two = min(bits_of(part), bits_of(L::all(0x1.FFFFFEP0F * kPart)));
    const F rank = floats_of_bits(below_two + found.region.as_exponent);
    if constexpr (kSigned) return with_sign(to_ints(rank), found.x);
    return min(to_ints(rank), bits_of(found.x));  // For x = 0 this is 0; with kAdded it saturates to code 0.
  }

 private:
  Lines lines_;
  typename L::DecadeSearch decades_;
  typename L::Table8 gain_;
};

/// 4-bit codes. Signed values use the map of maps.h. Unsigned codes stand for 1/16, 2/16, ... 16/16 of the
/// scale: no code stands for zero, because a step divides by the square root (2309.01507, section 4.1).
template <class L, bool kSigned>
class Int4Code : public Int4Scaled<L> {
 public:
  using F = typename L::Floats;
  using I = typename L::Ints;
  using Map = DynamicMap4;
  static constexpr bool kLooksUp = true;  ///< whether it uses tables
  static constexpr float kUnits = kSigned ? 1 : 16;
  static constexpr int kAdded = 0;
  static const Map& map() { return signed_dynamic_map4(); }

  REEF_LANE explicit Int4Code(const Map& map) : value_(map.value), ranks_(map.regions) {}

  using Unit = float;
  REEF_LANE Unit unit(float scale) const { return kSigned ? scale : scale * (1.0F / 16); }
  REEF_LANE F decode(I code, Unit unit) const {
    if constexpr (kSigned) {
      return value_[code] * L::all(unit);
    } else {
      return value(code, L::all(unit));
    }
  }
  /// Decodes unsigned codes with a separate unit for each lane.
  REEF_LANE static F value(I code, F unit) { return fma(to_floats(code), unit, unit); }

  REEF_LANE I find(F kept, F units) const {
    if constexpr (kSigned) {
      const F x = kept * units;
      return max(with_sign(ranks_(abs(x)), x) + L::all(7), L::all(0));
    } else {
      return to_ints(fma(kept, units, L::all(-0.5F)));
    }
  }
  REEF_LANE I code(I found) const { return found; }

 private:
  typename L::Table16 value_;
  typename L::template RegionSearch<Regions::Parts::kQuarters> ranks_;
};

/// FlashOptim's companding (2602.23349, section 3.2) in blocks of 32. A first moment is encoded through
/// 2x / (1 + |x|), a second moment through its square root. Unlike in the paper, the scale is a bfloat16 (a
/// float16 underflows below 6e-8), and a second moment that is not zero never becomes zero.
template <class L, bool kSigned>
class Companded8Code {
 public:
  using F = typename L::Floats;
  using I = typename L::Ints;
  struct Map {};
  using Scale = std::uint16_t;
  static constexpr int kBlock = 32;
  static constexpr int kBits = 8;
  static constexpr bool kLooksUp = false;  ///< whether it uses tables
  static constexpr float kUnits = kSigned ? 1 : 255;
  static constexpr int kAdded = kSigned ? 128 : 0;
  static Map map() { return {}; }

  REEF_LANE explicit Companded8Code(Map) {}

  using Unit = float;
  REEF_LANE Unit unit(float scale) const { return kSigned ? scale : scale * (1.0F / 255); }
  REEF_LANE F decode(I code, Unit unit) const {
    return expanded(to_floats(code) - L::all(static_cast<float>(kAdded)), unit);
  }

  static constexpr bool kKeepsValues = kSigned;
  REEF_LANE static F kept(F x) {
    if constexpr (kSigned) return x;
    return min(sqrt(x), L::all(0x1.FEP63F));  // The largest bfloat16 whose square is finite.
  }
  REEF_LANE static F scale(F largest) {  // Rounds up to a bfloat16.
    const I up = shift_left<16>(shift_right<16>(bits_of(largest) + L::all(0xFFFF)));
    return floats_of_bits(min(up, L::all(0x7F7F0000)));
  }
  REEF_LANE F find(F kept, F units) const { return kept * units; }
  REEF_LANE I code(F x) const {
    if constexpr (kSigned) return rounded(companded(x));
    return max(rounded(x), min(bits_of(x), L::all(1)));  // This is 0 only if x is 0.
  }

 protected:
  REEF_LANE static F companded(F x) {
    const F part = L::all(1.0F / 254);
    return x / fma(abs(x), part, part);
  }
  REEF_LANE static F expanded(F y, Unit unit) {
    if constexpr (kSigned) return y / (L::all(254.0F) - abs(y)) * L::all(unit);
    const F root = y * L::all(unit);
    return root * root;
  }
};

}  // namespace reef::kernels
