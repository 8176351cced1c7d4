// Floats in 1 to 8 bits: levels, their means, variances and bytes; the same bits from all instructions.
#include "kernels/packed_levels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/packed_levels/one_block.h"
#include "kernels/random_key.h"

namespace reef::kernels {
namespace {

using Floats = std::vector<float>;
using Bytes = std::vector<std::uint8_t>;

Floats normal(std::int64_t elements, unsigned seed, float scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> of(0, scale);
  Floats values(static_cast<std::size_t>(elements));
  std::generate(values.begin(), values.end(), [&] { return of(random); });
  return values;
}

Bytes encoded(const Floats& values, int bits, std::uint64_t key) {
  const auto elements = static_cast<std::int64_t>(values.size());
  Bytes packed(static_cast<std::size_t>(packed_bytes(elements, bits)) + 1, 77);
  encode_levels(values.data(), elements, bits, key, packed.data());
  EXPECT_EQ(packed.back(), 77) << "written beyond the end";
  packed.pop_back();
  return packed;
}

Floats decoded(const std::vector<Bytes>& parts, int bits, std::int64_t elements) {
  std::vector<const std::uint8_t*> from;
  for (const Bytes& part : parts) from.push_back(part.data());
  Floats values(static_cast<std::size_t>(elements) + 1, 77);
  sum_of_packed(from, bits, elements, values.data());
  EXPECT_EQ(values.back(), 77) << "written beyond the end";
  values.pop_back();
  return values;
}

/// Of each element's block.
float step_of_element(const Floats& values, std::size_t i, int bits) {
  const std::size_t first = i / kLevelBlock * kLevelBlock;
  const std::size_t last = std::min(values.size(), first + kLevelBlock);
  float largest = 0;
  for (std::size_t k = first; k < last; ++k) largest = std::max(largest, std::fabs(values[k]));
  return largest / static_cast<float>((1 << (bits - 1)) - 1);
}

TEST(PackedLevels, AnElementBecomesALevelNextToIt) {
  for (int bits = 2; bits <= 8; ++bits) {
    for (const std::int64_t elements : {0, 1, 2, 511, 512, 513, 5000, 100000}) {
      for (const float scale : {1.0F, 1e-40F, 1e30F}) {
        const Floats values = normal(elements, 3, scale);
        EXPECT_EQ(packed_bytes(elements, bits), (elements + 511) / 512 * (4 + 64 * bits));
        const Floats found = decoded({encoded(values, bits, 5)}, bits, elements);
        for (std::size_t i = 0; i < values.size(); ++i) {
          // A step is rounded up to 16 bits, and by its last bit where it has no more.
          const float step = step_of_element(values, i, bits) * (1 + 0x1p-15F) + 0x1p-140F;
          ASSERT_LE(std::fabs(found[i] - values[i]), step) << bits << " bits, " << i << " of " << elements;
          ASSERT_TRUE(values[i] == 0 || found[i] * (values[i] > 0 ? 1.0F : -1.0F) >= 0) << "another sign";
        }
      }
    }
  }
}

// Whatever can be sent is sent as it is, whatever the random numbers.
TEST(PackedLevels, ALevelStaysWhatItIs) {
  for (int bits = 2; bits <= 8; ++bits) {
    const Floats levels = decoded({encoded(normal(3000, 1), bits, 1)}, bits, 3000);
    for (std::uint64_t key = 2; key < 20; ++key)
      EXPECT_EQ(decoded({encoded(levels, bits, key)}, bits, 3000), levels) << bits;
  }
  const Floats whole = {3, -127, 0, 127, 1, -1, 64};
  EXPECT_EQ(decoded({encoded(whole, 8, 1)}, 8, 7), whole);
  const Floats zeros(700, 0);
  EXPECT_EQ(decoded({encoded(zeros, 4, 1)}, 4, 700), zeros);
}

// Of 10000 draws: an element's mean is the element, and its variance at most a quarter of the step's square.
TEST(PackedLevels, IsUnbiasedWithinItsVariance) {
  constexpr int kDraws = 10000;
  for (const int bits : {2, 3, 4, 8}) {
    const Floats values = normal(600, 11);
    std::vector<double> sum(values.size()), squares(values.size());
    for (int draw = 0; draw < kDraws; ++draw) {
      const Floats found = decoded({encoded(values, bits, random_key({9, std::uint64_t(draw)}))}, bits, 600);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double error = double(found[i]) - values[i];
        sum[i] += error;
        squares[i] += error * error;
      }
    }
    double all = 0, all_variance = 0, all_bound = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double step = step_of_element(values, i, bits) * (1 + 0x1p-15);
      const double steps = std::fabs(values[i]) / step, above = steps - std::floor(steps);
      const double variance = step * step * above * (1 - above);
      EXPECT_LE(std::fabs(sum[i]) / kDraws, 5 * std::sqrt(variance / kDraws) + 1e-3 * step)
          << bits << ", " << i;
      all += sum[i] / kDraws;
      all_variance += squares[i] / kDraws;
      all_bound += step * step / 4;
    }
    EXPECT_LE(std::fabs(all), 4 * std::sqrt(all_variance / kDraws)) << bits;
    EXPECT_LE(all_variance, all_bound) << bits;
    EXPECT_GE(all_variance, all_bound / 3) << bits << ": less than chance gives";
  }
}

// Errors of other keys, and of neighbours, have nothing to do with each other.
TEST(PackedLevels, ErrorsAreIndependent) {
  constexpr std::int64_t kElements = 200000;
  const Floats values = normal(kElements, 4);
  const auto errors = [&](std::uint64_t key) {
    Floats found = decoded({encoded(values, 4, key)}, 4, kElements);
    for (std::size_t i = 0; i < found.size(); ++i) found[i] -= values[i];
    return found;
  };
  const auto correlation = [](const Floats& a, const Floats& b, std::size_t by) {
    double ab = 0, aa = 0, bb = 0;
    for (std::size_t i = by; i < a.size(); ++i) {
      ab += double(a[i]) * b[i - by];
      aa += double(a[i]) * a[i];
      bb += double(b[i - by]) * b[i - by];
    }
    return std::fabs(ab) / std::sqrt(aa * bb);
  };
  const double most = 4 / std::sqrt(double(kElements));
  const Floats first = errors(random_key({0, 1, 0}));
  for (const auto& other :
       {errors(random_key({0, 1, 1})), errors(random_key({0, 2, 0})), errors(1), errors(2)})
    EXPECT_LT(correlation(first, other, 0), most);
  for (const std::size_t by : {1U, 2U, 512U}) EXPECT_LT(correlation(first, first, by), most);
  EXPECT_EQ(first, errors(random_key({0, 1, 0})));
}

TEST(PackedLevels, WhatIsNotFiniteArrivesWithItsBlock) {
  const float all[] = {std::nanf(""), std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity(), __builtin_bit_cast(float, 0x7FFFFFFFU)};
  for (const float wrong : all) {
    for (int bits = 1; bits <= 8; ++bits) {
      Floats values = normal(1500, 2);
      values[700] = wrong;
      Bytes packed(static_cast<std::size_t>(packed_bytes(1500, bits)));
      Floats left = values;
      if (bits == 1) {
        encode_signs(left.data(), 1500, packed.data());
      } else {
        encode_levels(values.data(), 1500, bits, 3, packed.data());
      }
      const Floats found = decoded({packed}, bits, 1500);
      for (std::size_t i = 0; i < found.size(); ++i) {
        ASSERT_EQ(std::isnan(found[i]), i / 512 == 1) << bits << ", " << i;
        ASSERT_TRUE(bits > 1 || i / 512 != 1 || left[i] == 0);
      }
    }
  }
  // The step of one level is beyond float32.
  const Floats large(600, std::numeric_limits<float>::max());
  for (const float value : decoded({encoded(large, 2, 1)}, 2, 600)) ASSERT_TRUE(std::isnan(value));
}

TEST(PackedLevels, SignsLoseWhatTheyLeave) {
  for (const std::int64_t elements : {0, 1, 511, 512, 513, 5000}) {
    const Floats values = normal(elements, 8);
    Floats left = values;
    EXPECT_EQ(packed_bytes(elements, 1), (elements + 511) / 512 * 68);
    Bytes packed(static_cast<std::size_t>(packed_bytes(elements, 1)));
    encode_signs(left.data(), elements, packed.data());
    const Floats found = decoded({packed}, 1, elements);
    for (std::size_t first = 0; first < values.size(); first += kLevelBlock) {
      const std::size_t last = std::min(values.size(), first + kLevelBlock);
      double mean = 0;
      for (std::size_t i = first; i < last; ++i) mean += std::fabs(double(values[i]));
      mean /= double(last - first);
      for (std::size_t i = first; i < last; ++i) {
        ASSERT_NEAR(found[i], values[i] < 0 ? -mean : mean, 1e-6 * mean);
        ASSERT_EQ(left[i], values[i] - found[i]);
      }
    }
  }
}

TEST(PackedLevels, SumsAreInTheOrderOfTheirParts) {
  for (const int bits : {2, 5, 8}) {
    std::vector<Bytes> parts;
    Floats expected(1000);
    for (unsigned part = 0; part < 5; ++part) {
      parts.push_back(encoded(normal(1000, part, std::exp2f(4.0F * static_cast<float>(part))), bits, part));
      const Floats one = decoded({parts.back()}, bits, 1000);
      for (std::size_t i = 0; i < one.size(); ++i) expected[i] = part == 0 ? one[i] : expected[i] + one[i];
    }
    EXPECT_EQ(decoded(parts, bits, 1000), expected);
  }
}

TEST(PackedLevels, TheSameBitsFromAllInstructions) {
  const PackedBlocks* const fast = packed_blocks_with_avx2();
  if (fast == nullptr) GTEST_SKIP() << "this processor has no AVX2";
  for (std::int64_t count : {1, 7, 511, 512}) {
    for (const float scale : {1.0F, 1e-42F, 1e38F}) {
      Floats values = normal(count, static_cast<unsigned>(count), scale);
      values[0] = -0.0F;
      for (int bits = 1; bits <= 8; ++bits) {
        Bytes one(static_cast<std::size_t>(packed_bytes(count, bits))), other(one);
        Floats left = values, other_left = values, sum(512), other_sum(512);
        if (bits == 1) {
          kBlocks.encode_signs(left.data(), count, one.data());
          fast->encode_signs(other_left.data(), count, other.data());
        } else {
          kBlocks.encode_levels(values.data(), count, bits, 0x123456789ABCDEFU, one.data());
          fast->encode_levels(values.data(), count, bits, 0x123456789ABCDEFU, other.data());
        }
        ASSERT_EQ(one, other) << bits << " bits of " << count;
        ASSERT_EQ(std::memcmp(left.data(), other_left.data(), left.size() * sizeof(float)), 0);
        Bytes codes(512), other_codes(512), again(one.size() - 4), other_again(again);
        kBlocks.unpack(one.data() + 4, bits, codes.data());
        fast->unpack(one.data() + 4, bits, other_codes.data());
        ASSERT_EQ(codes, other_codes) << bits << " bits of " << count;
        kBlocks.pack(codes.data(), bits, again.data());
        fast->pack(codes.data(), bits, other_again.data());
        ASSERT_EQ(again, other_again) << bits << " bits of " << count;
        ASSERT_TRUE(std::equal(again.begin(), again.end(), one.begin() + 4)) << bits << " bits of " << count;
        const std::uint8_t* const parts[] = {one.data(), other.data(), one.data()};
        kBlocks.sum(parts, 3, bits, count, sum.data());
        fast->sum(parts, 3, bits, count, other_sum.data());
        ASSERT_EQ(std::memcmp(sum.data(), other_sum.data(), sum.size() * sizeof(float)), 0);
      }
    }
  }
}

}  // namespace
}  // namespace reef::kernels
