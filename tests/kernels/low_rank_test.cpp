// Rows made orthonormal, and what factors of a low rank leave of a matrix.
#include "kernels/low_rank.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace reef::kernels {
namespace {

using Floats = std::vector<float>;

Floats normal(std::int64_t elements, unsigned seed, float scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> of(0, scale);
  Floats values(static_cast<std::size_t>(elements));
  std::generate(values.begin(), values.end(), [&] { return of(random); });
  return values;
}

double dot(const Floats& rows, std::int64_t a, std::int64_t b, std::int64_t length) {
  double sum = 0;
  for (std::int64_t i = 0; i < length; ++i)
    sum += static_cast<double>(rows[static_cast<std::size_t>(a * length + i)]) *
           static_cast<double>(rows[static_cast<std::size_t>(b * length + i)]);
  return sum;
}

void expect_orthonormal(const Floats& rows, std::int64_t count, std::int64_t length) {
  for (std::int64_t a = 0; a < count; ++a) {
    for (std::int64_t b = 0; b <= a; ++b)
      ASSERT_NEAR(dot(rows, a, b, length), a == b ? 1 : 0, 1e-6) << a << ", " << b << " of " << length;
  }
}

TEST(LowRank, RowsBecomeOrthonormalAndSpanTheSame) {
  for (const std::int64_t length : {1, 5, 8, 100, 3001}) {
    for (const float scale : {1.0F, 1e-30F, 1e30F}) {
      const std::int64_t count = std::min<std::int64_t>(length, 6);
      const Floats before = normal(count * length, 3, scale);
      Floats rows = before;
      orthonormalize(rows.data(), count, length);
      expect_orthonormal(rows, count, length);
      // What was a row is made up by the first so many.
      for (std::int64_t k = 0; k < count; ++k) {
        std::vector<double> left(static_cast<std::size_t>(length));
        for (std::int64_t i = 0; i < length; ++i)
          left[static_cast<std::size_t>(i)] =
              static_cast<double>(before[static_cast<std::size_t>(k * length + i)]) /
              static_cast<double>(scale);
        double norm = 0;
        for (std::int64_t other = 0; other <= k; ++other) {
          double share = 0;
          for (std::int64_t i = 0; i < length; ++i)
            share += left[static_cast<std::size_t>(i)] *
                     static_cast<double>(rows[static_cast<std::size_t>(other * length + i)]);
          for (std::int64_t i = 0; i < length; ++i)
            left[static_cast<std::size_t>(i)] -=
                share * static_cast<double>(rows[static_cast<std::size_t>(other * length + i)]);
        }
        for (const double value : left) norm += value * value;
        ASSERT_LE(std::sqrt(norm), 1e-5 * std::sqrt(static_cast<double>(length)));
      }
    }
  }
}

// Rows that are nearly, or exactly, what others make up; rows of zeros; more rows than there are directions.
TEST(LowRank, RowsWithNothingOfTheirOwnHarmNone) {
  Floats rows = normal(3 * 50, 1);
  std::copy_n(rows.begin(), 50, rows.begin() + 50);
  rows[53] += 1e-6F;
  orthonormalize(rows.data(), 3, 50);
  expect_orthonormal(rows, 3, 50);

  Floats zeros = normal(3 * 50, 2);
  std::fill_n(zeros.begin() + 50, 50, 0.0F);
  orthonormalize(zeros.data(), 3, 50);
  EXPECT_EQ(dot(zeros, 1, 1, 50), 0);
  EXPECT_NEAR(dot(zeros, 0, 0, 50), 1, 1e-6);
  EXPECT_NEAR(dot(zeros, 2, 2, 50), 1, 1e-6);
  EXPECT_NEAR(dot(zeros, 0, 2, 50), 0, 1e-6);

  Floats none(100, 0);
  orthonormalize(none.data(), 4, 25);
  for (const float value : none) EXPECT_EQ(value, 0);

  Floats many = normal(3 * 2, 3);
  orthonormalize(many.data(), 3, 2);
  for (const float value : many) EXPECT_TRUE(std::isfinite(value));
  EXPECT_NEAR(dot(many, 0, 1, 2), 0, 1e-6);
}

TEST(LowRank, WhatIsNotFiniteStays) {
  for (const float wrong : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    Floats rows = normal(3 * 20, 4);
    rows[25] = wrong;
    orthonormalize(rows.data(), 3, 20);
    EXPECT_NEAR(dot(rows, 0, 0, 20), 1, 1e-6);
    EXPECT_TRUE(std::isnan(rows[25]));
    EXPECT_TRUE(std::isnan(rows[45]));
  }
}

TEST(LowRank, TakesTheProductAndLeavesTheRest) {
  for (const std::int64_t rank : {1, 3, 8}) {
    for (const std::int64_t columns : {1, 33, 512, 1100}) {
      const std::int64_t rows = 21;
      const Floats left = normal(rank * rows, 5), right = normal(rank * columns, 6),
                   before = normal(rows * columns, 7);
      Floats matrix = before, rest(before.size());
      matrix[5 % matrix.size()] = std::numeric_limits<float>::infinity();
      take_low_rank(matrix.data(), rest.data(), left.data(), right.data(), rows, columns, rank, 3);
      for (std::int64_t i = 0; i < rows * columns; ++i) {
        double product = 0;
        for (std::int64_t k = 0; k < rank; ++k)
          product += static_cast<double>(left[static_cast<std::size_t>(k * rows + i / columns)]) *
                     static_cast<double>(right[static_cast<std::size_t>(k * columns + i % columns)]);
        const auto at = static_cast<std::size_t>(i);
        ASSERT_NEAR(matrix[at], product, 1e-5);
        const float beyond = at == 5 % matrix.size() ? 0.0F : before[at] - matrix[at] / 3;
        ASSERT_EQ(rest[at], beyond);
      }
    }
  }
}

}  // namespace
}  // namespace reef::kernels
