#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/optim_step.h"
#include "kernels/optim_tensors.h"

// What four bits a code keep of its rounding.
namespace reef::kernels {
namespace {

struct Pair {
  OptimFormat plain, compensated;
};
constexpr Pair kPairs[] = {{OptimFormat::kInt8, OptimFormat::kInt8Compensated},
                           {OptimFormat::kInt4, OptimFormat::kInt4Compensated},
                           {OptimFormat::kCompanded8, OptimFormat::kCompanded8Compensated}};

std::vector<float> through(const Format& f, const std::vector<float>& given) {
  std::vector<std::byte> scales;
  const auto codes = encoded(f, given, scales);
  return decoded(f, codes, scales, static_cast<std::int64_t>(given.size()));
}

std::vector<float> any_values(Random& random, bool is_signed) {
  std::vector<float> given = values(random, any_size(random), 1);
  for (float& x : given) x = is_signed ? x : std::fabs(x);
  return given;
}

// A part is a fourteenth of the way to the next code, so a rounding by chance loses a sixth of its square in
// the mean, where the code alone loses 49 thirds of it.
TEST(Rest, LosesATenthOfWhatTheCodeLoses) {
  Random random(20);
  for (const auto& [plain, compensated] : kPairs) {
    for (const bool is_signed : {true, false}) {
      double lost = 0, lost_plain = 0;
      for (int row = 0; row < 400; ++row) {
        const std::vector<float> given = any_values(random, is_signed);
        const auto coarse = through({plain, is_signed}, given);
        const auto fine = through({compensated, is_signed}, given);
        for (std::size_t i = 0; i < given.size(); ++i) {
          lost += std::pow(fine[i] - given[i], 2);
          lost_plain += std::pow(coarse[i] - given[i], 2);
        }
      }
      EXPECT_LT(lost, lost_plain / 80) << static_cast<int>(plain) << is_signed;
    }
  }
}

TEST(Rest, IsRightInTheMean) {
  Random random(24);
  constexpr std::size_t kTiles = 4000;
  for (const auto& [plain, compensated] : kPairs) {
    for (const bool is_signed : {true, false}) {
      std::vector<float> tile = values(random, kTileElements, 0.99);
      for (float& x : tile) x = is_signed ? x : std::fabs(x);
      for (std::size_t i = 0; i < tile.size(); i += 32) tile[i] = 1;  // so that every scale is 1
      if (is_signed) tile[33] = -1;
      std::vector<float> given;
      for (std::size_t i = 0; i < kTiles; ++i) given.insert(given.end(), tile.begin(), tile.end());
      const auto fine = through({compensated, is_signed}, given);
      for (std::size_t i = 0; i < tile.size(); ++i) {
        double mean = 0, largest = 0;
        for (std::size_t k = 0; k < kTiles; ++k) {
          const double error = double{fine[k * kTileElements + i]} - tile[i];
          mean += error / kTiles;
          largest = std::max(largest, std::fabs(error));
        }
        const bool has_end = plain == OptimFormat::kInt4 && !is_signed && tile[i] < 1.0F / 256;
        if (!has_end) {
          EXPECT_LE(std::fabs(mean), 5 * largest / std::sqrt(double{kTiles}) + 1e-6) << tile[i];
        }
      }
    }
  }
}

TEST(Rest, ZeroAndTheLargestComeBack) {
  for (const auto& [plain, compensated] : kPairs) {
    for (const bool is_signed : {true, false}) {
      std::vector<float> given(kTileElements, 0);
      for (std::size_t i = 0; i < given.size(); i += 32) given[i] = is_signed && i % 64 == 0 ? -0.75F : 0.75F;
      const auto found = through({compensated, is_signed}, given);
      for (std::size_t i = 0; i < given.size(); ++i) {
        if (given[i] != 0) {
          // Companding divides by a little more, so that one in hundreds comes out a number less.
          ASSERT_NEAR(found[i], given[i], plain == OptimFormat::kCompanded8 ? 3e-4 : 1e-6);
        } else if (is_signed || plain != OptimFormat::kInt4) {
          ASSERT_EQ(found[i], 0);
        }
      }
    }
  }
}

TEST(Rest, NoSecondMomentBecomesZeroAndNoZeroBecomesOne) {
  Random random(22);
  for (const auto& [plain, compensated] : kPairs) {
    for (int row = 0; row < 100; ++row) {
      const std::vector<float> given = any_values(random, false);
      const auto found = through({compensated, false}, given);
      for (std::size_t i = 0; i < given.size(); ++i) {
        if (given[i] > 1e-12F) {
          ASSERT_GT(found[i], 0) << given[i];
        }
        if (given[i] == 0 && plain != OptimFormat::kInt4) {
          ASSERT_EQ(found[i], 0);
        }
      }
    }
  }
}

// A moving average that changes by less than half of the way to the next code stands still in eight bits.
TEST(Rest, AMovingAverageMoves) {
  Random random(23);
  for (const auto& [plain, compensated] : kPairs) {
    const auto after = [&](OptimFormat format) {
      Tensor tensor = random_tensor(random, format, 2 * kTileElements);
      OptimConstants& c = tensor.plain.constants;
      c.decay2 = 0.999F;
      c.gain2 = 0.001F;
      c.gain1 = 0.1F;
      c.rate = 0;
      const auto rmsprop =
          portable().step[static_cast<std::size_t>(OptimRule::kRmsprop)][static_cast<std::size_t>(format)];
      const auto elements = static_cast<std::size_t>(tensor.plain.elements);
      const auto run = [&](float gradient, int steps) {
        std::vector<float> given(elements, gradient);
        for (std::size_t i = 0; i < elements; i += 32) given[i] = 1;  // which keeps the scales
        fill(tensor.gradient, OptimDtype::kFloat32, given);
        for (int i = 0; i < steps; ++i) {
          tensor.plain.key = static_cast<std::uint32_t>(random());
          rmsprop(tensor.view(), 0, tensor.tiles());
        }
      };
      run(1, 8000);
      run(0.75F, 5000);
      std::vector<float> found(elements);
      portable().decode[static_cast<std::size_t>(format)][0](tensor.view().states[0], found.data(),
                                                             tensor.plain.elements, 0, tensor.tiles());
      return found[5];
    };
    const double expected = 0.5625 + 0.4375 * std::pow(0.999, 5000);
    EXPECT_NEAR(after(compensated), expected, 0.03) << static_cast<int>(plain);
    EXPECT_GT(std::fabs(after(plain) - expected), 0.2) << static_cast<int>(plain);
  }
}

}  // namespace
}  // namespace reef::kernels
