#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/optim_step.h"
#include "kernels/optim_step/codecs.h"
#include "kernels/optim_step/lanes_scalar.h"
#include "kernels/optim_step/maps.h"
#include "kernels/optim_step/rules.h"
#include "kernels/optim_tensors.h"
#include "kernels/reference/optim_step.h"
#include "kernels/warp_kernels.h"

namespace reef::kernels {
namespace {

const std::vector<Format> kMapped = {{OptimFormat::kInt8, true},       {OptimFormat::kInt8, false},
                                     {OptimFormat::kInt4, true},       {OptimFormat::kInt4, false},
                                     {OptimFormat::kCompanded8, true}, {OptimFormat::kCompanded8, false}};

TEST(Codec, GoldenValuesOfTheDynamicMaps) {
  const std::vector<float> with_sign = reference::map_of(OptimFormat::kInt8, true);
  const std::vector<float> without = reference::map_of(OptimFormat::kInt8, false);
  ASSERT_EQ(with_sign.size(), 256U);
  ASSERT_EQ(without.size(), 256U);
  EXPECT_FLOAT_EQ(with_sign.front(), -0.99296875F);
  EXPECT_FLOAT_EQ(with_sign[1], -0.97890625F);
  EXPECT_EQ(with_sign[127], 0);
  EXPECT_FLOAT_EQ(with_sign[128], 5.5e-7F);
  EXPECT_FLOAT_EQ(with_sign[129], 3.25e-6F);
  EXPECT_FLOAT_EQ(with_sign[254], 0.99296875F);
  EXPECT_EQ(with_sign[255], 1);
  EXPECT_EQ(without[0], 0);
  EXPECT_FLOAT_EQ(without[1], 3.25e-7F);
  EXPECT_FLOAT_EQ(without[2], 7.75e-7F);
  EXPECT_FLOAT_EQ(without[254], 0.996484375F);
  EXPECT_EQ(without[255], 1);
  EXPECT_TRUE(std::is_sorted(with_sign.begin(), with_sign.end()));
  EXPECT_TRUE(std::is_sorted(without.begin(), without.end()));
}

TEST(Codec, EveryCodeComesBackAsItself) {
  for (const Format& f : kMapped) {
    const std::vector<float> map = reference::map_of(f.format, f.is_signed);
    const bool four = f.format == OptimFormat::kInt4;
    const std::size_t block = four ? 128 : f.format == OptimFormat::kCompanded8 ? 32 : 256;
    // Each block begins with its largest value, 1, so that its scale is 1.
    for (std::size_t code = 0; code < map.size(); ++code) {
      if (f.format == OptimFormat::kCompanded8 && f.is_signed && code == 0) continue;  // not in use
      const float size =
          f.format == OptimFormat::kCompanded8 && !f.is_signed ? map[code] * map[code] : map[code];
      std::vector<float> given(kTileElements, size);
      for (std::size_t i = 0; i < given.size(); i += block) given[i] = 1;
      std::vector<std::byte> scales;
      const auto codes = encoded(f, given, scales);
      const auto found = static_cast<std::size_t>(codes[1] & (four ? 15 : 255));
      EXPECT_EQ(found, code) << static_cast<int>(f.format) << f.is_signed;
      if (four) {
        EXPECT_EQ(codes[1] >> 4, static_cast<int>(code));
      }
      const auto back = decoded(f, codes, scales, kTileElements);
      EXPECT_NEAR(back[1], size, 3e-7 * std::fabs(size));
      if (f.format != OptimFormat::kCompanded8) {
        EXPECT_EQ(back[1], map[code]);
      }
    }
  }
}

TEST(Codec, CodesAreTheNearest) {
  Random random(7);
  for (const Format& f : kMapped) {
    if (f.format == OptimFormat::kCompanded8) continue;  // the nearest after companding: see below
    const std::vector<float> map = reference::map_of(f.format, f.is_signed);
    std::size_t borders = 0;
    for (int row = 0; row < 200; ++row) {
      std::vector<float> given = values(random, kTileElements, 1);
      for (std::size_t i = 3; i < given.size(); i += 7) {  // about the borders between codes
        const std::size_t code = random() % (map.size() - 1);
        given[i] = (map[code] + map[code + 1]) / 2;
        for (std::uint64_t ulps = random() % 3; ulps > 0; --ulps) given[i] = std::nextafter(given[i], 2.0F);
      }
      given[0] = given[128] = 1;
      if (!f.is_signed) {
        for (float& x : given) x = std::fabs(x);
      }
      std::vector<std::byte> scales;
      const auto codes = encoded(f, given, scales);
      for (std::size_t i = 0; i < given.size(); ++i) {
        const int code = f.format == OptimFormat::kInt4 ? codes[i % 128] >> (i < 128 ? 0 : 4) & 15 : codes[i];
        const int best = reference::nearest_code(map, f.is_signed, given[i]);
        if (code == best) continue;
        const auto distance = [&](int c) {
          return std::fabs(double{map[static_cast<std::size_t>(c)]} - given[i]);
        };
        ASSERT_LE(distance(code), distance(best) + 1e-6 * std::fabs(given[i])) << given[i];
        ++borders;
      }
    }
    EXPECT_LT(borders, 200U * 40U / 2);
  }
}

TEST(Codec, CompandedErrorsAreBounded) {
  Random random(8);
  for (const bool is_signed : {true, false}) {
    const Format f{OptimFormat::kCompanded8, is_signed};
    for (int row = 0; row < 500; ++row) {
      std::vector<float> given = values(random, 300, std::pow(10, static_cast<double>(random() % 60) - 40));
      if (!is_signed) {
        for (float& x : given) x = std::fabs(x);
      }
      std::vector<std::byte> scales;
      const auto codes = encoded(f, given, scales);
      const auto found = decoded(f, codes, scales, 300);
      for (std::size_t begin = 0; begin < given.size(); begin += 32) {
        double largest = 0;
        const std::size_t end = std::min(begin + 32, given.size());
        for (std::size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(double{given[i]}));
        for (std::size_t i = begin; i < end; ++i) {
          // Half a step of the code, through the slope of the inverse: at most 1/127 of the largest; of a
          // root, 1/255.
          const double bound = is_signed ? largest / 120 : 2 * largest / 250;
          ASSERT_NEAR(found[i], given[i], bound + FLT_MIN) << "largest " << largest;
          ASSERT_TRUE(given[i] != 0 || found[i] == 0);
          const bool counts = !is_signed && given[i] > 1e-12 * largest && largest > 1e-18 && largest < 1e30;
          ASSERT_TRUE(!counts || found[i] > 0) << given[i];
        }
      }
    }
  }
}

TEST(Codec, LevelsAndAWarpAgreeOnEverything) {
  Random random(9);
  for (const OptimKernels* kernels :
       {optim_kernels(OptimLevel::kAvx512), optim_kernels(OptimLevel::kAvx2), &warp_kernels()}) {
    if (kernels == nullptr) continue;
    std::vector<Format> formats = kMapped;
    for (const OptimFormat format : {OptimFormat::kInt8Compensated, OptimFormat::kInt4Compensated,
                                     OptimFormat::kCompanded8Compensated}) {
      formats.insert(formats.end(), {{format, true}, {format, false}});
    }
    for (const Format& f : formats) {
      for (int row = 0; row < 100; ++row) {
        const std::int64_t elements = any_size(random);
        std::vector<float> given =
            values(random, elements, std::pow(10, static_cast<double>(random() % 70) - 35));
        if (!f.is_signed) {
          for (float& x : given) x = std::fabs(x);
        }
        std::vector<std::byte> scales, fast_scales;
        const auto codes = encoded(f, given, scales);
        ASSERT_EQ(encoded(f, given, fast_scales, *kernels), codes);
        ASSERT_EQ(fast_scales, scales);
        ASSERT_EQ(decoded(f, codes, scales, elements, *kernels), decoded(f, codes, scales, elements));
      }
    }
  }
}

// Where regions of a map begin, and where the guess of one changes (Regions, maps.h): levels find regions in
// ways of their own.
TEST(Codec, LevelsAndAWarpAgreeAtTheEdgesOfRegions) {
  std::vector<float> edges;
  for (const Regions* regions :
       {&signed_dynamic_map().regions, &unsigned_dynamic_map().regions, &signed_dynamic_map4().regions,
        &signed_fine_map().regions, &unsigned_fine_map().regions, &signed_fine_map4().regions}) {
    for (const float edge : regions->edge) edges.push_back(edge <= 1 ? edge : 1);
  }
  for (int guess = 0; guess < 8; ++guess) {
    const int above = (65536 * guess + Regions::kGuessGain - 1) / Regions::kGuessGain;
    edges.push_back(floats_of_bits(scalar::Ints{(Regions::kGuessFrom + above) << 16}).v);
  }
  std::vector<float> given;
  for (const float edge : edges) {
    given.insert(given.end(), {edge, std::nextafter(edge, 0.0F), std::nextafter(edge, 1.0F), -edge,
                               -std::nextafter(edge, 0.0F), -std::nextafter(edge, 1.0F)});
  }
  given.resize((given.size() + kTileElements - 1) / kTileElements * kTileElements, 0.0F);
  for (std::size_t i = 0; i < given.size(); i += 32)
    given.insert(given.begin() + static_cast<std::ptrdiff_t>(i), 1.0F);  // the scale is 1
  for (const OptimKernels* kernels :
       {optim_kernels(OptimLevel::kAvx512), optim_kernels(OptimLevel::kAvx2), &warp_kernels()}) {
    if (kernels == nullptr) continue;
    for (const OptimFormat format : kFormats) {
      for (const bool is_signed : {true, false}) {
        std::vector<float> values = given;
        for (float& x : values) x = is_signed ? x : std::fabs(x);
        std::vector<std::byte> scales, fast_scales;
        const auto codes = encoded({format, is_signed}, values, scales);
        ASSERT_EQ(encoded({format, is_signed}, values, fast_scales, *kernels), codes);
        ASSERT_EQ(fast_scales, scales);
      }
    }
  }
}

TEST(Codec, WhatOverflowsBecomesTheLargestFloat) {
  for (const Format& f : kMapped) {
    std::vector<float> given(kTileElements, std::numeric_limits<float>::infinity());
    given[3] = 1e38F;
    std::vector<std::byte> scales;
    const auto codes = encoded(f, given, scales);
    const auto found = decoded(f, codes, scales, kTileElements);
    std::vector<std::byte> warp_scales;
    ASSERT_EQ(encoded(f, given, warp_scales, warp_kernels()), codes);
    ASSERT_EQ(warp_scales, scales);
    for (const float x : found) {
      EXPECT_TRUE(std::isfinite(x));
      EXPECT_GT(x, 0);
    }
    EXPECT_GT(found[0], 1e38F);
  }
}

TEST(Codec, BytesOfAState) {
  const auto bytes = [](OptimFormat format, std::int64_t n) {
    return optim_codes_bytes(format, n) + optim_scales_bytes(format, n);
  };
  constexpr std::int64_t n = 1 << 20;
  EXPECT_EQ(bytes(OptimFormat::kFloat32, n), 4 * n);
  EXPECT_EQ(bytes(OptimFormat::kBFloat16, n), 2 * n);
  EXPECT_EQ(bytes(OptimFormat::kInt8, n), n + n / 64);
  EXPECT_EQ(bytes(OptimFormat::kInt4, n), n / 2 + n / 32);
  EXPECT_EQ(bytes(OptimFormat::kCompanded8, n), n + n / 16);
  EXPECT_EQ(bytes(OptimFormat::kInt8Compensated, n), n + n / 2 + n / 64);
  EXPECT_EQ(bytes(OptimFormat::kInt4Compensated, n), n + n / 32);
  EXPECT_EQ(bytes(OptimFormat::kCompanded8Compensated, n), n + n / 2 + n / 16);
  EXPECT_EQ(bytes(OptimFormat::kInt8, 1), 5);
  EXPECT_EQ(bytes(OptimFormat::kInt8Compensated, 1), 6);
  EXPECT_EQ(bytes(OptimFormat::kInt8Compensated, 256 + 130), 384 + 130 + 128 + 8);
  EXPECT_EQ(bytes(OptimFormat::kInt4, 129), 128 + 8);
  for (const OptimFormat format : kFormats) EXPECT_EQ(bytes(format, 0), 0);
}

using L = scalar::Lanes;

// Without the processor's divider, as it does.
TEST(Codec, DividingByAConstantRoundsAsTheDivision) {
  std::vector<float> divisors = {1, 0x1.FFFFFEp-1F, 0.5F, 0x1.000002p-1F, 0x1.8p-6F};
  for (int step = 1; step < 20'000; step = step * 3 + 1) {
    divisors.push_back(static_cast<float>(std::sqrt(1 - std::pow(0.999, step))));
  }
  for (const float by : divisors) {
    OptimConstants constants;
    constants.correction = by;
    const Correction<L, true> correction(constants);
    for (std::uint32_t mantissa = 0; mantissa < 1U << 23; ++mantissa) {
      const L::Floats x = floats_of_bits(scalar::Ints{static_cast<std::int32_t>(0x3F800000U | mantissa)});
      ASSERT_EQ(correction.of(x).v, x.v / by);
    }
    const float smallest_root = std::sqrt(std::numeric_limits<float>::denorm_min());
    for (const float x : {0.0F, smallest_root, std::sqrt(FLT_MAX), std::numeric_limits<float>::infinity()}) {
      ASSERT_EQ(correction.of(L::all(x)).v, x / by);
    }
  }
}

}  // namespace
}  // namespace reef::kernels
