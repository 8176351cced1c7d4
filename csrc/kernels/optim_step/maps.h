#pragma once

#include "kernels/lane.h"

/// Tables in which lanes look up the values that codes stand for.
namespace reef::kernels {

/// The regions of a map. Each region has a formula of its own; region i + 1 begins at edge[i]. Each kind of
/// lanes finds the region of a value in the way that suits it: by counting edges, or by looking up the part
/// of the number line that the value lies in. A part is a binade or a quarter of one, is indexed by the low
/// five bits of its number, and contains at most one edge.
struct Regions {
  enum class Parts { kBinades, kQuarters };
  static constexpr float kLeastQuarter = 0x1.4p-8F;  ///< smaller values are in the same part as this one
  static constexpr float kLeastBinade = 0x1p-31F;

  /// For edges that are about a decade apart, from below 1e-6 to 1: a magnitude whose upper 16 bits are
  /// kGuessFrom + n has reached floor(n * kGuessGain / 65536) edges or one more.
  static constexpr int kGuessFrom = 13248;  ///< the upper 16 bits of 1.5 * 2^-24
  static constexpr int kGuessGain = 164;    ///< 65536 / (128 steps per binade * 3.12 binades per edge)

  /// Takes `count` edges, at most eight, in ascending order.
  Regions(Parts parts, const double* edges, int count);

  float edge[8];             ///< unused entries are infinite
  float edge_in_part[32];    ///< infinite if there is none
  float region_of_part[32];  ///< the region at its beginning: an integer, stored as the bits of a float
};

/// The dynamic map of Dettmers et al. 2022 (2110.02861, section 1.3, as its authors build it). Decade i of 7
/// is (0.1, 1) * 10^(i-6), and its values are the centres of n equal parts: n is 2^i for each sign, or
/// 2^(i+1) if the map is unsigned. 0 and 1 are values too.
///
/// Ranks count the values upward from zero. The binary exponent of a rank (unsigned: of the rank + 1) numbers
/// its decade. So a value is a linear function of its rank, and the exponent of the rank selects the
/// function. Conversely, 8/9 + value * gain goes from 1 to 2 in each decade: with the decade's exponent, this
/// is the rank (unsigned: the rank + 1).
struct DynamicMap {
  explicit DynamicMap(bool is_signed);

  /// Ranks are multiplied by this to decode them, so that the low four bits of the exponent number the
  /// decade.
  REEF_LANE static constexpr float multiple(bool is_signed) { return is_signed ? 4 : 2; }
  /// 8/9 + value * gain is scaled by this, so that adding the number of the region to its exponent gives the
  /// rank (unsigned: the rank + 1).
  REEF_LANE static constexpr float part(bool is_signed) { return is_signed ? 0.5F : 1.0F; }
  static constexpr float kLeast = 0x1p-23F;  ///< smaller values are in the same region as this one

  /// Indexed by the number of the decade, from 1 to 7; index 0 is for zero and index 8 for one. Unsigned:
  /// value = base + width * multiple * (rank + 1). Signed: value = width * multiple * rank - base.
  float base[16];
  float width[16];
  /// For each binade from 2^-31 on, the integer that turns the exponent of a value into the number of its
  /// region when it is added to the bits of the value; regions are zero, the decades and one. If a binade
  /// contains an edge, values beyond the edge carry into the exponent. Stored as the bits of a float.
  float jump[32];
  Regions regions;
  float gain[8];  ///< indexed by the low three bits of the region's number; zero needs no gain
};
const DynamicMap& signed_dynamic_map();
const DynamicMap& unsigned_dynamic_map();

/// The signed 4-bit map of Li et al. 2023 (2309.01507, appendix E.2): 0, seven values of each sign, and 1.
struct DynamicMap4 {
  DynamicMap4();

  float value[16];  ///< indexed by code
  Regions regions;  ///< one for each rank, counted from zero
};
const DynamicMap4& signed_dynamic_map4();

/// A continuous version of the dynamic map, in sixteenths of a rank: decade i covers the values from 0.1 to 1
/// times 10^(i-6), and the map is linear between zero and the first decade.
struct FineDynamicMap {
  explicit FineDynamicMap(bool is_signed);

  /// shift() is added to a rank so that its exponent numbers the decade; first_exponent() is the biased
  /// exponent of the shifted ranks below the first decade.
  REEF_LANE static constexpr float shift(bool is_signed) { return is_signed ? 0.5F : 1.0F; }
  REEF_LANE static constexpr int first_exponent(bool is_signed) { return is_signed ? 126 : 127; }

  Regions regions;  ///< the values below the decades, the decades, and 1
  float base[16];   ///< indexed by region: value = base + width * (rank + shift)
  float width[16];
  float offset[16];  ///< indexed by region: 16 * rank = offset + gain * value
  float gain[16];
};
const FineDynamicMap& signed_fine_map();
const FineDynamicMap& unsigned_fine_map();

/// A continuous version of the signed 4-bit map: linear from each value to the next in sixteen parts, or in
/// eight parts to 1.
struct FineDynamicMap4 {
  FineDynamicMap4();

  Regions regions;  ///< one for each whole rank
  float base[8];    ///< indexed by whole rank: value = base + width * (16 * rank)
  float width[8];
  float offset[8];  ///< indexed by whole rank: 16 * rank = offset + gain * value
  float gain[8];
};
const FineDynamicMap4& signed_fine_map4();

}  // namespace reef::kernels
