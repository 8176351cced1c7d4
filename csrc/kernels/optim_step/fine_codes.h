#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/lane.h"
#include "kernels/optim_step/codes.h"
#include "kernels/optim_step/maps.h"

/// Codes that keep four bits of their rounding error. There are sixteen numbers for each code, on continuous
/// versions of the same maps. A value is rounded stochastically to a number, so that the decoded value is
/// right on average: a moving average that changes by less than the last place still moves. Zero has a number
/// of its own; in an unsigned state no other value gets it.
///
/// The interface is that of codes.h, except that decode() takes numbers, which number(kept, kUnits / scale,
/// drawn) returns; `drawn` is a random integer from 0 to 65535.
namespace reef::kernels {

/// Encodes with piecewise linear functions: the number of a value is a linear function of the value, and its
/// region selects the function.
template <class L, Regions::Parts kParts>
class NumberLines {
 public:
  using F = typename L::Floats;
  template <class Map>
  REEF_LANE explicit NumberLines(const Map& map)
      : region_(map.regions), offset_(map.offset), gain_(map.gain) {}

  REEF_LANE F number(F size) const {
    const auto region = region_(size);
    return fma(size, gain_[region], offset_[region]);
  }

 private:
  typename L::template RegionSearch<kParts> region_;
  typename L::Table8 offset_, gain_;
};

template <class L, bool kSigned>
class Int8FineCode : public Int8Scaled<L> {
 public:
  using F = typename L::Floats;
  using I = typename L::Ints;
  using Lines = RankLines<L, typename L::Table9>;
  using Unit = typename Lines::Unit;
  using Map = FineDynamicMap;
  static constexpr bool kLooksUp = true;
  static constexpr float kUnits = 1;
  static const Map& map() { return kSigned ? signed_fine_map() : unsigned_fine_map(); }

  REEF_LANE explicit Int8FineCode(const Map& map) : lines_(map), numbers_(map) {}

  REEF_LANE Unit unit(float scale) const { return lines_.unit(scale); }
  REEF_LANE F decode(I number, const Unit& unit) const {
    constexpr int kFirst = FineDynamicMap::first_exponent(kSigned);
    const F sixteenth = L::all(1.0F / 16);
    const F shift = L::all(FineDynamicMap::shift(kSigned));
    if constexpr (kSigned) {
      const F rank = to_floats(number - L::all(kZero));
      return copysign(Lines::template value<kFirst>(fma(abs(rank), sixteenth, shift), unit), rank);
    } else {
      return Lines::template value<kFirst>(fma(to_floats(number), sixteenth, shift), unit);
    }
  }

  REEF_LANE I number(F kept, F units, F drawn) const {
    const F chance_of_one = L::all(1.0F / 65536);  // A power of two, so the product in the fma() is exact.
    const F x = kept * units;
    const F size = kSigned ? abs(x) : x;
    const F rank = fma(drawn, chance_of_one, numbers_.number(size));
    if constexpr (kSigned) {
      return with_sign(to_ints(min(rank, L::all(static_cast<float>(kZero)))), x) + L::all(kZero);
    } else {
      return max(to_ints(min(rank, L::all(4080.0F))), min(bits_of(x), L::all(1)));  // 0 only if x is 0.
    }
  }

 private:
  static constexpr std::int32_t kZero = 127 * 16 + 8;
  Lines lines_;
  NumberLines<L, Regions::Parts::kBinades> numbers_;
};

template <class L, bool kSigned>
class Int4FineCode : public Int4Scaled<L> {
 public:
  using F = typename L::Floats;
  using I = typename L::Ints;
  using Map = FineDynamicMap4;
  static constexpr bool kLooksUp = true;
  static constexpr float kUnits = kSigned ? 1 : 256;
  static const Map& map() { return signed_fine_map4(); }

  REEF_LANE explicit Int4FineCode(const Map& map) : base_(map.base), width_(map.width), numbers_(map) {}

  using Unit = float;
  REEF_LANE Unit unit(float scale) const { return kSigned ? scale : scale * (1.0F / 256); }
  REEF_LANE F decode(I number, Unit unit) const {
    if constexpr (kSigned) {
      const F rank = to_floats(number - L::all(kZero));
      const F size = abs(rank);
      const I between = shift_right<4>(to_ints(size));
      return (fma(width_[between], size, base_[between]) ^ sign_of(rank)) * L::all(unit);
    } else {
      return fma(to_floats(number), L::all(unit), L::all(unit));
    }
  }

  REEF_LANE I number(F kept, F units, F drawn) const {
    const F chance_of_one = L::all(1.0F / 65536);  // A power of two, so the product in the fma() is exact.
    if constexpr (kSigned) {
      const F x = kept * units;
      const F size = abs(x);
      const F rank = fma(drawn, chance_of_one, numbers_.number(size));
      return with_sign(to_ints(min(rank, L::all(static_cast<float>(kZero)))), x) + L::all(kZero);
    } else {
      const F rank = fma(drawn, chance_of_one, fma(kept, units, L::all(-1.0F)));
      return to_ints(max(min(rank, L::all(255.0F)), L::all(0.0F)));
    }
  }

 private:
  static constexpr std::int32_t kZero = 7 * 16 + 8;
  typename L::Table8 base_, width_;
  NumberLines<L, Regions::Parts::kQuarters> numbers_;
};

template <class L, bool kSigned>
class Companded8FineCode : public Companded8Code<L, kSigned> {
 public:
  using F = typename L::Floats;
  using I = typename L::Ints;
  using Base = Companded8Code<L, kSigned>;
  using Map = typename Base::Map;
  REEF_LANE explicit Companded8FineCode(Map map) : Base(map) {}

  using Unit = float;
  REEF_LANE F decode(I number, Unit unit) const {
    return Base::expanded(to_floats(number - L::all(kZero)) * L::all(1.0F / 16), unit);
  }
  REEF_LANE I number(F kept, F units, F drawn) const {
    const F chance_of_one = L::all(1.0F / 65536);  // A power of two, so the product in the fma() is exact.
    const F x = kept * units;
    const F sixteen = L::all(16.0F);
    if constexpr (kSigned) {
      return to_ints(
          fma(drawn, chance_of_one, fma(Base::companded(x), sixteen, L::all(static_cast<float>(kZero)))));
    } else {
      return max(to_ints(fma(x, sixteen, drawn * chance_of_one)),
                 min(bits_of(x), L::all(1)));  // This is 0 only if x is 0.
    }
  }

 private:
  static constexpr std::int32_t kZero = kSigned ? 128 * 16 + 8 : 0;
};

}  // namespace reef::kernels
