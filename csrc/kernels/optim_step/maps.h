#pragma once

#include "kernels/lane.h"

/// The values that codes stand for, as tables for lanes to look up.
namespace reef::kernels {

/// Where the regions of a map begin, of which each is one formula: region i + 1 begins at edge[i]. Lanes find
/// the region of a value in the way that suits them: by counting edges, or by looking up the part of the
/// number line (a binade or a quarter of one, by the low five bits of its number) that the value lies in. A
/// part has at most one edge in it.
struct Regions {
  enum class Parts { kBinades, kQuarters };
  static constexpr float kLeastQuarter = 0x1.4p-8F;  ///< what is smaller is in the part that this is in
  static constexpr float kLeastBinade = 0x1p-31F;

  /// For edges that are about a decade apart, from below 1e-6 to 1: a size whose bits' upper half is
  /// kGuessFrom + n has reached at least n * kGuessGain / 65536 (cut off) edges, and at most one more.
  static constexpr int kGuessFrom = 13248;  ///< of 2^-23.5
  static constexpr int kGuessGain = 164;    ///< 65536 / 128 binary digits / 3.12 binades

  /// So many edges, at most eight, in order.
  Regions(Parts parts, const double* edges, int count);

  float edge[8];             ///< what is not in use is infinite
  float edge_in_part[32];    ///< infinite if there is none
  float region_of_part[32];  ///< of its beginning, as the bits of an integer
};

/// The dynamic map of Dettmers et al. 2022 (2110.02861, section 1.3, as its authors build it): in decade i of
/// 7, n = 2^i (signed, each side) or 2^(i+1) values in the middle of equal parts of (0.1, 1) * 10^(i-6); then
/// 0 and 1. With ranks counted upward from zero, the decade is the binary exponent of the rank or, unsigned,
/// of the rank + 1: so a value is a line in it, chosen by its exponent. And the other way, a value's part of
/// its decade is (8/9 + value * gain), from 1 to 2 in each: with the decade's exponent, that is the rank or,
/// unsigned, the rank + 1.
struct DynamicMap {
  explicit DynamicMap(bool is_signed);

  /// Ranks are decoded times this, so that their exponents' low four bits are the number of the decade.
  REEF_LANE static constexpr float multiple(bool is_signed) { return is_signed ? 4 : 2; }
  /// A decade's part is counted times this, so that adding the number of its region to the exponent gives the
  /// rank or, unsigned, the rank + 1.
  REEF_LANE static constexpr float part(bool is_signed) { return is_signed ? 0.5F : 1.0F; }
  static constexpr float kLeast = 0x1p-23F;  ///< what is smaller is in the first region that is not zero's

  /// By the decade's number, from 1; 0: of zero, 8: of one. Unsigned, value = base + width * multiple * (rank
  /// + 1); signed, width * multiple * rank - base.
  float base[16];
  float width[16];
  /// Regions are zero, the decades and one. By binade, from 2^-31: added to the bits of a value, gives its
  /// region's number in the place of the exponent, where an edge inside the binade is passed by a carry. As
  /// the bits of a float.
  float jump[32];
  Regions regions;
  float gain[8];  ///< by the low three bits of the region's number: zero needs none
};
const DynamicMap& signed_dynamic_map();
const DynamicMap& unsigned_dynamic_map();

/// The signed 4-bit map of Li et al. 2023 (2309.01507, appendix E.2): 0, seven values of each sign, and 1.
struct DynamicMap4 {
  DynamicMap4();

  float value[16];  ///< by code
  Regions regions;  ///< of ranks, counted from zero
};
const DynamicMap4& signed_dynamic_map4();

/// The dynamic map as a continuous one, in sixteenths of a rank: decade i has the values from 0.1 to 1 times
/// 10^(i-6), and what is below the first decade is a line to zero.
struct FineDynamicMap {
  explicit FineDynamicMap(bool is_signed);

  /// What is added to a rank, so that its exponent is the decade's; and the exponent of the line to zero.
  REEF_LANE static constexpr float shift(bool is_signed) { return is_signed ? 0.5F : 1.0F; }
  REEF_LANE static constexpr int first_exponent(bool is_signed) { return is_signed ? 126 : 127; }

  Regions regions;  ///< below the decades, the decades, 1
  float base[16];   ///< by region: value = base + width * (rank + shift)
  float width[16];
  float offset[16];  ///< by region: 16 ranks = offset + gain * value
  float gain[16];
};
const FineDynamicMap& signed_fine_map();
const FineDynamicMap& unsigned_fine_map();

/// The signed 4-bit map as lines from one value to the next, in sixteenths; half of the way to 1 has eight.
struct FineDynamicMap4 {
  FineDynamicMap4();

  Regions regions;  ///< one for each whole rank
  float base[8];    ///< by whole ranks: value = base + width * sixteenths
  float width[8];
  float offset[8];  ///< by whole ranks: sixteenths = offset + gain * value
  float gain[8];
};
const FineDynamicMap4& signed_fine_map4();

}  // namespace reef::kernels
