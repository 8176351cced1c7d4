#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "kernels/optim_matrices.h"
#include "kernels/optim_step.h"
#include "kernels/optim_tensors.h"
#include "kernels/reference/optim_step.h"
#include "kernels/warp_kernels.h"

namespace reef::kernels {
namespace {

struct Kind {
  const char* name;
  const OptimKernels* kernels;
};
std::vector<Kind> kinds() {
  std::vector<Kind> found;
  for (const Kind& kind : {Kind{"AVX-512", optim_kernels(OptimLevel::kAvx512)},
                           Kind{"AVX2", optim_kernels(OptimLevel::kAvx2)}, Kind{"a warp", &warp_kernels()}}) {
    if (kind.kernels != nullptr) found.push_back(kind);
  }
  return found;
}

TEST(Rank1, IsForRulesWithASecondMoment) {
  for (int rule = 0; rule < kOptimRules; ++rule) {
    const std::vector<bool> signs = signs_of(static_cast<OptimRule>(rule));
    const bool expected = std::count(signs.begin(), signs.end(), false) > 0;
    EXPECT_EQ(portable().survey[rule] != nullptr, expected) << rule;
    EXPECT_EQ(portable().step[rule][kRank1] != nullptr, expected) << rule;
  }
  EXPECT_EQ(rules().size(), 8U);
}

TEST(Rank1, ScalesOfRowsAndColumnsNeedAtMostABitAnElement) {
  for (const OptimMatrix& shape : kShapes) {
    const std::int64_t elements = shape.rows * shape.columns;
    const std::int64_t bits = 8 * optim_scales_bytes(OptimFormat::kInt4Rank1, elements, shape);
    EXPECT_EQ(bits, 32 * (shape.rows + shape.columns));
    EXPECT_EQ(has_rank1_scales(shape), bits <= elements);
  }
}

TEST(Rank1, EveryInstructionSetAndAWarpGiveTheSameBits) {
  Random random(1);
  constexpr Choice kChoices[] = {{},
                                 {OptimDtype::kBFloat16, OptimDtype::kBFloat16, OptimMaster::kNone},
                                 {OptimDtype::kBFloat16, OptimDtype::kFloat32, OptimMaster::kFloat32},
                                 {OptimDtype::kFloat16, OptimDtype::kFloat16, OptimMaster::kSplit},
                                 {OptimDtype::kBFloat16, OptimDtype::kBFloat16, OptimMaster::kStochastic}};
  for (const OptimRule rule : rules()) {
    for (const OptimMatrix& shape : kShapes) {
      for (const Choice& choice : kChoices) {
        Matrix plain(random, rule, shape, choice);
        for (int step = 0; step < 3; ++step) {
          plain.give_gradient(random);
          const Matrix before = plain;
          plain.step(portable());
          for (const auto& [name, kernels] : kinds()) {
            Matrix fast = before;
            fast.step(*kernels);
            ASSERT_TRUE(fast.tensor == plain.tensor)
                << name << ", rule " << static_cast<int>(rule) << ", " << shape.rows << " rows of "
                << shape.columns << ", step " << step;
          }
        }
      }
    }
  }
}

TEST(Rank1, StepsAsTheReferenceDoes) {
  Random random(2);
  for (const OptimRule rule : rules()) {
    for (int row = 0; row < 60; ++row) {
      const OptimMatrix& shape = kShapes[row % std::size(kShapes)];
      Matrix found(random, rule, shape);
      for (int step = 0; step < row % 3; ++step) {
        found.give_gradient(random);
        found.step(portable());
      }
      found.give_gradient(random);
      found.tensor.plain.constants.trust = 0.37F;
      Matrix expected = found;
      reference::step(expected.view(), rule, OptimFormat::kInt4Rank1);
      found.step(portable());
      ASSERT_EQ(found.tensor.parameter, expected.tensor.parameter) << "row " << row;
      for (std::size_t k = 0; k < found.signs.size(); ++k) {
        ASSERT_EQ(found.tensor.scales[k], expected.tensor.scales[k]) << "row " << row << ", state " << k;
        const std::int64_t elements = shape.rows * shape.columns;
        const auto ours = codes_of(found.tensor.codes[k], OptimFormat::kInt4, elements).codes;
        const auto theirs = codes_of(expected.tensor.codes[k], OptimFormat::kInt4, elements).codes;
        std::size_t differ = 0;
        for (std::size_t i = 0; i < ours.size(); ++i) {
          // Of a value within a float's rounding of the border between two codes.
          ASSERT_LE(std::abs(ours[i] - theirs[i]), 1) << "row " << row << ", state " << k;
          differ += ours[i] != theirs[i];
        }
        ASSERT_LE(differ, ours.size() / 100 + 2);
      }
    }
  }
}

TEST(Rank1, LeavesATensorWhoseGradientIsNotFiniteAsItIs) {
  Random random(3);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const std::size_t at : {0, 700, 4999}) {
      Matrix matrix(random, OptimRule::kAdam, {50, 100});
      matrix.give_gradient(random);
      matrix.step(portable());
      matrix.give_gradient(random);
      std::memcpy(matrix.tensor.gradient.data() + 4 * at, &bad, 4);
      const Matrix before = matrix;
      EXPECT_EQ(matrix.step(portable()), 1);
      EXPECT_TRUE(matrix.tensor == before.tensor);
      for (const auto& [name, kernels] : kinds()) EXPECT_EQ(matrix.survey(*kernels), 1) << name;
    }
  }
}

TEST(Rank1, ThreadsMaySurveyInAnyOrder) {
  Random random(4);
  Matrix whole(random, OptimRule::kAdam, {700, 300});
  whole.give_gradient(random);
  Matrix shared = whole;
  whole.survey(portable());
  for (const auto& [name, kernels] : kinds()) {
    for (auto& scales : shared.new_scales) std::fill(scales.begin(), scales.end(), 0.0F);
    const OptimTensor& view = shared.view();
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t, k = kernels] {
        for (std::int64_t tile = shared.tensor.tiles() - 1 - t; tile >= 0; tile -= 4)
          k->survey[shared.r()](view, tile, tile + 1);
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(shared.new_scales[1], whole.new_scales[1]) << name;
  }
}

// ---- values

struct Encoded {
  std::vector<std::byte> codes;
  std::vector<float> scales;
};
Encoded encoded_matrix(const OptimKernels& kernels, const std::vector<float>& given,
                       const OptimMatrix& shape) {
  const auto elements = static_cast<std::int64_t>(given.size());
  const std::int64_t tiles = (elements + kTileElements - 1) / kTileElements;
  Encoded found{
      std::vector<std::byte>(static_cast<std::size_t>(optim_codes_bytes(OptimFormat::kInt4Rank1, elements))),
      std::vector<float>(static_cast<std::size_t>(shape.rows + shape.columns))};
  OptimState state{found.codes.data(), reinterpret_cast<std::byte*>(found.scales.data())};
  state.matrix = shape;
  state.new_scales = found.scales.data();
  kernels.survey_values(given.data(), state, elements, 0, tiles);
  kernels.encode[kRank1][0](given.data(), state, elements, 0, tiles);
  return found;
}
std::vector<float> decoded_matrix(const OptimKernels& kernels, Encoded from, const OptimMatrix& shape) {
  const std::int64_t elements = shape.rows * shape.columns;
  std::vector<float> found(static_cast<std::size_t>(elements));
  OptimState state{from.codes.data(), reinterpret_cast<std::byte*>(from.scales.data())};
  state.matrix = shape;
  kernels.decode[kRank1][0](state, found.data(), elements, 0, (elements + kTileElements - 1) / kTileElements);
  return found;
}
std::vector<float> second_moments(Random& random, std::int64_t elements) {
  std::vector<float> given = values(random, elements, 0.1);
  for (float& x : given) x *= x;
  return given;
}

TEST(Rank1, ScalesAreTheLargestAndValuesTheNearestSixteenth) {
  Random random(5);
  for (const OptimMatrix& shape : kShapes) {
    const std::vector<float> given = second_moments(random, shape.rows * shape.columns);
    std::vector<float> scales(static_cast<std::size_t>(shape.rows + shape.columns), 0.0F);
    const auto places = [&](std::size_t i) {
      const auto columns = static_cast<std::size_t>(shape.columns);
      return std::pair(i / columns, static_cast<std::size_t>(shape.rows) + i % columns);
    };
    for (std::size_t i = 0; i < given.size(); ++i) {
      const auto [row, column] = places(i);
      scales[row] = std::max(scales[row], given[i]);
      scales[column] = std::max(scales[column], given[i]);
    }
    const Encoded found = encoded_matrix(portable(), given, shape);
    EXPECT_EQ(found.scales, scales);
    const std::vector<float> back = decoded_matrix(portable(), found, shape);
    for (std::size_t i = 0; i < given.size(); ++i) {
      const auto [row, column] = places(i);
      const float unit = std::min(scales[row], scales[column]) / 16;
      const double nearest = std::clamp(std::nearbyint(double{given[i]} / unit), 1.0, 16.0) * unit;
      if (unit == 0) {
        ASSERT_EQ(back[i], 0);
      } else {
        ASSERT_NEAR(std::fabs(back[i] - given[i]), std::fabs(nearest - given[i]), 1e-5 * unit) << i;
        ASSERT_GT(back[i], 0) << "a step divides by its root";
      }
    }
    for (const auto& [name, kernels] : kinds()) {
      const Encoded theirs = encoded_matrix(*kernels, given, shape);
      ASSERT_EQ(theirs.codes, found.codes) << name;
      ASSERT_EQ(theirs.scales, found.scales) << name;
      ASSERT_EQ(decoded_matrix(*kernels, theirs, shape), back) << name;
    }
  }
}

TEST(Rank1, WhatIsTooLargeBecomesTheLargest) {
  const OptimMatrix shape{20, 30};
  std::vector<float> given(600, 1.0F);
  given[77] = std::numeric_limits<float>::infinity();
  for (const auto& [name, kernels] : kinds()) {
    const std::vector<float> back = decoded_matrix(*kernels, encoded_matrix(*kernels, given, shape), shape);
    EXPECT_EQ(back[77], std::numeric_limits<float>::max()) << name;
    EXPECT_EQ(back[78], 1.0F) << name;
  }
}

// What it is for (2309.01507, section 4.2): a few columns are larger than the others, so that every block has
// some of them.
TEST(Rank1, KeepsSmallColumnsBesideLargeOnes) {
  Random random(6);
  const OptimMatrix shape{128, 256};
  std::vector<float> given(static_cast<std::size_t>(shape.rows * shape.columns));
  for (std::size_t i = 0; i < given.size(); ++i) {
    const double own = 0.5 + std::generate_canonical<double, 53>(random);
    given[i] = static_cast<float>(i % 256 % 50 == 0 ? own : own / 1000);
  }
  const auto error = [&](const std::vector<float>& back) {
    double sum = 0;
    for (std::size_t i = 0; i < given.size(); ++i) sum += std::fabs(std::log(back[i] / given[i]));
    return sum / static_cast<double>(given.size());
  };
  std::vector<std::byte> scales;
  const Format blocks{OptimFormat::kInt4, false};
  const auto codes = encoded(blocks, given, scales);
  const double of_blocks = error(decoded(blocks, codes, scales, shape.rows * shape.columns));
  const double of_rank1 = error(decoded_matrix(portable(), encoded_matrix(portable(), given, shape), shape));
  EXPECT_GT(of_blocks, 3);
  EXPECT_LT(of_rank1, 0.03);
}

}  // namespace
}  // namespace reef::kernels
