#pragma once

#include "kernels/lane.h"

/// The values that codes stand for, as tables for lanes to look up.
namespace reef::kernels {

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
  static constexpr float kLeast = 0x1p-23F;  ///< what is smaller is in the first region that is not zero's

  /// By the decade's number, from 1; 0: of zero, 8: of one. Unsigned, value = base + width * multiple * (rank
  /// + 1); signed, width * multiple * rank - base.
  float base[16];
  float width[16];
  /// By binade, from 2^-31: added to the bits of a value, gives its region's exponent, where a region's edge
  /// inside the binade is passed by a carry. As the bits of a float.
  float jump[32];
  float gain[16];  ///< by the low four bits of that exponent
};
const DynamicMap& signed_dynamic_map();
const DynamicMap& unsigned_dynamic_map();

/// The signed 4-bit map of Li et al. 2023 (2309.01507, appendix E.2): 0, seven values of each sign, and 1.
struct DynamicMap4 {
  DynamicMap4();

  static constexpr float kLeast = 0x1.4p-8F;  ///< what is smaller has its code
  float value[16];                            ///< by code
  float edge[32];  ///< by quarter of a binade, from `kLeast` to 1, by its low five bits
  float rank[32];  ///< of its beginning
};
const DynamicMap4& signed_dynamic_map4();

/// The dynamic map as a continuous one, in sixteenths of a rank: decade i has the values from 0.1 to 1 times
/// 10^(i-6), and what is below the first decade is a line to zero.
struct FineDynamicMap {
  explicit FineDynamicMap(bool is_signed);

  float base[16];  ///< by the exponent's low four bits of rank + 1/2 or, unsigned, + 1: value = base + width
                   ///< * it
  float width[16];
  float edge[32];    ///< by binade, from 2^-31: from here on it is the next region's
  float region[32];  ///< by binade: region of its beginning, as the bits of an integer
  float offset[16];  ///< by region (below the decades, the decades, 1): 16 ranks = offset + gain * value
  float gain[16];
};
const FineDynamicMap& signed_fine_map();
const FineDynamicMap& unsigned_fine_map();

/// The signed 4-bit map as lines from one value to the next, in sixteenths; half of the way to 1 has eight.
struct FineDynamicMap4 {
  FineDynamicMap4();

  float base[16];  ///< by whole ranks: value = base + width * sixteenths
  float width[16];
  float edge[32];  ///< by quarter of a binade, as DynamicMap4's
  float region[32];
  float offset[16];  ///< by whole ranks: sixteenths = offset + gain * value
  float gain[16];
};
const FineDynamicMap4& signed_fine_map4();

}  // namespace reef::kernels
