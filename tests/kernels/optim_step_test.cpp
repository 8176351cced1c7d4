#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/optim_step.h"
#include "kernels/optim_tensors.h"
#include "kernels/reference/optim_step.h"
#include "kernels/warp_kernels.h"

namespace reef::kernels {
namespace {

TEST_P(EveryKernel, EveryInstructionSetAndAWarpGiveTheSameBits) {
  Random random(static_cast<std::uint64_t>(17 * std::get<0>(GetParam()) + std::get<1>(GetParam())));
  const struct {
    const char* name;
    const OptimKernels* kernels;
  } kKinds[] = {{"AVX-512", optim_kernels(OptimLevel::kAvx512)},
                {"AVX2", optim_kernels(OptimLevel::kAvx2)},
                {"a warp", &warp_kernels()}};
  for (const auto& [name, kernels] : kKinds) {
    if (kernels == nullptr) continue;
    for (int row = 0; row < 60; ++row) {
      Tensor plain =
          random_tensor(random, format(), any_size(random), kEveryChoice[row % std::size(kEveryChoice)]);
      for (int step = 0; step < 3; ++step) {
        warm(plain, rule(), format(), random, 1);
        plain.plain.constants = random_constants(random);
        Tensor fast = plain;
        if (portable().measure[r()][f()] != nullptr) {
          const OptimSquares expected = portable().measure[r()][f()](plain.view(), 0, plain.tiles());
          const OptimSquares found = kernels->measure[r()][f()](fast.view(), 0, fast.tiles());
          if (kernels == &warp_kernels()) {  // sums of another order
            ASSERT_NEAR(found.parameter, expected.parameter, 1e-6 * expected.parameter);
            ASSERT_NEAR(found.measured, expected.measured, 1e-6 * expected.measured);
          } else {
            ASSERT_EQ(found.parameter, expected.parameter);
            ASSERT_EQ(found.measured, expected.measured);
          }
          ASSERT_TRUE(fast == plain) << "measuring writes nothing";
        }
        if (row % 7 == 0) put_nonfinite(plain, random);
        fast.gradient = plain.gradient;
        const std::int64_t bad = portable().step[r()][f()](plain.view(), 0, plain.tiles());
        ASSERT_EQ(kernels->step[r()][f()](fast.view(), 0, fast.tiles()), bad);
        ASSERT_TRUE(fast == plain) << name << ", row " << row << ", step " << step;
      }
    }
  }
}

// A value within a float's rounding of the border between two codes may take either: see CodesAreTheNearest.
void expect_same_states(const Tensor& found, const Tensor& expected, OptimFormat format,
                        const std::string& where) {
  for (int k = 0; k < kMostStates; ++k) {
    ASSERT_EQ(found.scales[k], expected.scales[k]) << where;
    const Codes ours = codes_of(found.codes[k], format, found.plain.elements);
    const Codes theirs = codes_of(expected.codes[k], format, found.plain.elements);
    std::size_t differ = 0;
    for (std::size_t i = 0; i < ours.codes.size(); ++i) {
      if (ours.rests.empty()) {
        ASSERT_LE(std::abs(ours.codes[i] - theirs.codes[i]), 1) << where;
        differ += ours.codes[i] != theirs.codes[i];
      } else {  // rounded by chance, the reference to the nearest
        const int apart = 16 * (ours.codes[i] - theirs.codes[i]) + ours.rests[i] - theirs.rests[i];
        ASSERT_LE(std::abs(apart), 1) << where << ", element " << i;
      }
    }
    ASSERT_LE(differ, ours.codes.size() / 200 + 2) << where << ", state " << k;
  }
}

TEST_P(EveryKernel, StepsAsTheReferenceDoes) {
  if (format() == OptimFormat::kBFloat16) GTEST_SKIP() << "rounds by chance; see Stochastic";
  Random random(static_cast<std::uint64_t>(1000 + 17 * std::get<0>(GetParam()) + std::get<1>(GetParam())));
  for (int row = 0; row < 150; ++row) {
    Tensor found = random_tensor(random, format(), any_size(random));
    warm(found, rule(), format(), random, static_cast<int>(random() % 3));
    fill(found.gradient, OptimDtype::kFloat32, values(random, found.plain.elements, 0.1));
    found.plain.constants = random_constants(random);
    if (rule() == OptimRule::kLamb || rule() == OptimRule::kLars) found.plain.constants.trust = 0.37F;
    Tensor expected = found;
    reference::step(expected.view(), rule(), format());
    portable().step[r()][f()](found.view(), 0, found.tiles());
    ASSERT_EQ(found.parameter, expected.parameter) << "row " << row;
    if (format() == OptimFormat::kFloat32) {
      ASSERT_TRUE(found == expected);
    } else {
      expect_same_states(found, expected, format(), "row " + std::to_string(row));
    }
  }
}

TEST_P(EveryKernel, LeavesATileWhoseGradientIsNotFiniteAsItIs) {
  Random random(5);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (const std::int64_t elements : {600, 512}) {
      for (const std::int64_t at : {0, 255, 256, 511, 599}) {
        if (at >= elements) continue;
        Tensor tensor = random_tensor(random, format(), elements);
        warm(tensor, rule(), format(), random, 2);
        Tensor clean = tensor;
        std::memcpy(tensor.gradient.data() + 4 * at, &bad, 4);
        const Tensor before = tensor;
        EXPECT_EQ(portable().step[r()][f()](tensor.view(), 0, tensor.tiles()), 1);
        portable().step[r()][f()](clean.view(), 0, clean.tiles());
        const auto tile = static_cast<std::size_t>(at / kTileElements);
        for (std::size_t i = 0; i < static_cast<std::size_t>(elements); ++i) {
          const auto& like = i / kTileElements == tile ? before : clean;
          ASSERT_EQ(std::memcmp(&tensor.parameter[4 * i], &like.parameter[4 * i], 4), 0) << "element " << i;
        }
        const std::size_t begin = tile * static_cast<std::size_t>(optim_codes_bytes(format(), kTileElements));
        for (int k = 0; k < kMostStates; ++k) {
          const std::size_t end =
              std::min(begin + static_cast<std::size_t>(optim_codes_bytes(format(), kTileElements)),
                       before.codes[k].size());
          ASSERT_TRUE(std::equal(before.codes[k].begin() + static_cast<std::ptrdiff_t>(begin),
                                 before.codes[k].begin() + static_cast<std::ptrdiff_t>(end),
                                 tensor.codes[k].begin() + static_cast<std::ptrdiff_t>(begin)));
        }
      }
    }
  }
}

// Shards begin at tiles: a tensor stepped in parts is the tensor stepped whole.
TEST_P(EveryKernel, TilesKnowNothingOfEachOther) {
  Random random(6);
  Tensor whole = random_tensor(random, format(), 5 * kTileElements + 77);
  warm(whole, rule(), format(), random, 2);
  whole.plain.constants = random_constants(random);
  Tensor parts = whole;
  portable().step[r()][f()](whole.view(), 0, whole.tiles());
  for (const std::int64_t tile : {4, 0, 5, 2, 1, 3}) portable().step[r()][f()](parts.view(), tile, tile + 1);
  EXPECT_TRUE(parts == whole);
}

std::string kernel_name(const testing::TestParamInfo<std::tuple<int, int>>& tested) {
  constexpr const char* kRules[] = {"Adam",
                                    "AdamMaximum",
                                    "Sgd",
                                    "Momentum",
                                    "Lion",
                                    "Rmsprop",
                                    "RmspropMomentum",
                                    "RmspropCentered",
                                    "RmspropCenteredMomentum",
                                    "Adagrad",
                                    "Lamb",
                                    "Lars"};
  constexpr const char* kNames[] = {"Float32",
                                    "BFloat16",
                                    "Int8",
                                    "Int4",
                                    "Companded8",
                                    "Int8Compensated",
                                    "Int4Compensated",
                                    "Companded8Compensated"};
  return std::string(kRules[std::get<0>(tested.param)]) + kNames[std::get<1>(tested.param)];
}
INSTANTIATE_TEST_SUITE_P(All, EveryKernel,
                         testing::Combine(testing::Range(0, kOptimRules),
                                          testing::Range(0, static_cast<int>(std::size(kFormats)))),
                         kernel_name);

TEST(Levels, AreFoundByTheirNamesWhereTheProcessorHasThem) {
  const std::vector<OptimLevel> found = levels();
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found.back(), OptimLevel::kPortable);
  EXPECT_TRUE(std::is_sorted(found.begin(), found.end())) << "best first";
  for (const OptimLevel level : {OptimLevel::kAvx512, OptimLevel::kAvx2, OptimLevel::kPortable}) {
    const auto by_name = level_by_name(level_name(level));
    ASSERT_EQ(by_name.has_value(), has_level(level)) << level_name(level);
    EXPECT_EQ(optim_kernels(level) != nullptr, has_level(level));
    EXPECT_EQ(std::count(found.begin(), found.end(), level), has_level(level) ? 1 : 0);
    if (by_name) {
      EXPECT_EQ(*by_name, level);
    }
  }
  EXPECT_EQ(level_by_name("portable"), OptimLevel::kPortable);
  for (const char* name : {"", "sse2", "AVX2", "avx2 "}) EXPECT_FALSE(level_by_name(name)) << name;
}

// A number rounded up or down by chance is right in the mean, and never off by a whole unit.
TEST(Stochastic, IsRightInTheMean) {
  Random random(10);
  const auto sgd = portable().step[static_cast<std::size_t>(OptimRule::kSgd)][0];
  for (const OptimDtype dtype : {OptimDtype::kBFloat16, OptimDtype::kFloat16}) {
    constexpr std::int64_t n = 1 << 16;
    for (const float start : {1.0F, -1.5F, 0.75F}) {
      Tensor tensor = random_tensor(random, OptimFormat::kFloat32, n,
                                    {dtype, OptimDtype::kFloat32, OptimMaster::kStochastic});
      fill(tensor.parameter, dtype, std::vector<float>(n, start));
      const float change = 1e-4F;  // less than half a unit in the last place
      fill(tensor.gradient, OptimDtype::kFloat32, std::vector<float>(n, -change));
      tensor.plain.constants.rate = -1;
      sgd(tensor.view(), 0, tensor.tiles());
      double sum = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        std::uint16_t half = 0;
        std::memcpy(&half, &tensor.parameter[static_cast<std::size_t>(2 * i)], 2);
        float value = 0;
        if (dtype == OptimDtype::kBFloat16) {
          const std::uint32_t bits = std::uint32_t{half} << 16;
          std::memcpy(&value, &bits, 4);
        } else {
          _Float16 number;
          std::memcpy(&number, &half, 2);
          value = static_cast<float>(number);
        }
        ASSERT_LE(std::fabs(value - (start + change)), dtype == OptimDtype::kBFloat16 ? 0x1p-7 : 0x1p-10);
        sum += value - start;
      }
      EXPECT_NEAR(sum / n, change, change / 3);
    }
  }
}

// 24 bits in two parts: steps far below the last place of the parameter add up.
TEST(Split, KeepsWhatTheParameterLoses) {
  Random random(11);
  const auto sgd = portable().step[static_cast<std::size_t>(OptimRule::kSgd)][0];
  for (const OptimDtype dtype : {OptimDtype::kBFloat16, OptimDtype::kFloat16}) {
    Tensor tensor = random_tensor(random, OptimFormat::kFloat32, 1000,
                                  {dtype, OptimDtype::kFloat32, OptimMaster::kSplit});
    fill(tensor.parameter, dtype, std::vector<float>(1000, 1));
    fill(tensor.gradient, OptimDtype::kFloat32, std::vector<float>(1000, -1));
    tensor.plain.constants.rate = dtype == OptimDtype::kBFloat16 ? -0x1p-14F : -0x1p-17F;
    for (int step = 0; step < 512; ++step) sgd(tensor.view(), 0, tensor.tiles());
    const std::uint16_t expected = half_of(dtype == OptimDtype::kBFloat16 ? 1 + 0x1p-5F : 1 + 0x1p-8F, dtype);
    std::uint16_t found = 0;
    std::memcpy(&found, tensor.parameter.data(), 2);
    EXPECT_NEAR(found, expected, 1);
    EXPECT_NE(found, half_of(1, dtype));
  }
}

}  // namespace
}  // namespace reef::kernels
