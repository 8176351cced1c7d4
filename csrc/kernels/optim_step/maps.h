#pragma once

/// The values that codes stand for, as tables for lanes to look up.
namespace reef::kernels {

/// The dynamic map of Dettmers et al. 2022 (2110.02861, section 1.3, as its authors build it): in decade i of
/// 7, n = 2^i (signed, each side) or 2^(i+1) values in the middle of equal parts of (0.1, 1) * 10^(i-6); then
/// 0 and 1. With ranks counted upward from zero, the decade is the binary exponent of the rank, or of the
/// rank + 1: so a value is a line in its rank, and a rank a line in its value, both chosen by an exponent.
struct DynamicMap {
  explicit DynamicMap(bool is_signed);

  float shift;     ///< added to a rank before its exponent is taken
  float base[16];  ///< by the exponent's low four bits: value = base + width * (rank + shift)
  float width[16];
  float edge[32];    ///< by binade, from 2^-31: from here on it is the next region's
  float region[32];  ///< by binade: region of its beginning, as the bits of an integer
  float offset[16];  ///< by region (0, the decades, 1): rank = floor(min(last, offset + gain * value))
  float gain[16];
  float last[16];
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
