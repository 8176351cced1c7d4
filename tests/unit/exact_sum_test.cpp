#include "kernels/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <boost/multiprecision/cpp_int.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace reef::kernels {
namespace {

using boost::multiprecision::cpp_int;

/// In units of 2^-1074.
cpp_int exact(double x) {
  int exponent = 0;
  const double fraction = std::frexp(x, &exponent);
  cpp_int mantissa(static_cast<std::int64_t>(std::ldexp(fraction, 53)));
  const int shift = exponent - 53 + 1074;
  return shift >= 0 ? cpp_int(mantissa << shift) : cpp_int(mantissa >> -shift);
}

/// To the nearest double, to even between two.
double nearest(const cpp_int& sum) {
  if (sum == 0) return 0;
  const int drop = std::max(0, static_cast<int>(msb(sum)) - 52);
  cpp_int kept = sum >> drop;
  const cpp_int lost = sum - (kept << drop);
  const cpp_int half = drop == 0 ? cpp_int(1) : cpp_int(cpp_int(1) << (drop - 1));
  if (drop > 0 && (lost > half || (lost == half && (kept & 1) == 1))) ++kept;
  return std::ldexp(kept.convert_to<double>(), drop - 1074);
}

std::vector<double> numbers(std::mt19937_64& random, int count) {
  std::vector<double> all;
  const int spread = static_cast<int>(random() % 600);
  for (int i = 0; i < count; ++i) {
    const double x = std::ldexp(1 + static_cast<double>(random() >> 12) * 0x1p-52,
                                static_cast<int>(random() % (2 * spread + 1)) - spread);
    all.push_back(random() % 50 == 0 ? 0.0 : x);
  }
  return all;
}

TEST(ExactSum, IsTheExactSumRoundedOnce) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 2000; ++round) {
    ExactSum sum;
    cpp_int expected = 0;
    for (const double x : numbers(random, 1 + static_cast<int>(random() % 60))) {
      sum.add(x);
      expected += exact(x);
    }
    EXPECT_EQ(sum.value(), nearest(expected));
  }
}

TEST(ExactSum, HasTheEdgesOfADouble) {
  const double least = std::numeric_limits<double>::denorm_min();
  for (const double x :
       {0.0, least, 3 * least, std::numeric_limits<double>::min(), 1.0, std::numeric_limits<double>::max()}) {
    ExactSum sum;
    sum.add(x);
    EXPECT_EQ(sum.value(), x);
  }
  ExactSum over;
  over.add(std::numeric_limits<double>::max());
  over.add(std::numeric_limits<double>::max());
  EXPECT_EQ(over.value(), std::numeric_limits<double>::infinity());
  // Halfway between two doubles, with and without something far below.
  for (const bool more : {false, true}) {
    ExactSum half;
    half.add(1);
    half.add(0x1p-53);
    if (more) half.add(0x1p-900);
    EXPECT_EQ(half.value(), more ? 1 + 0x1p-52 : 1);
  }
  for (const double bad :
       {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    ExactSum sum;
    sum.add(1);
    sum.add(bad);
    EXPECT_EQ(sum.value(), std::numeric_limits<double>::infinity());
  }
}

TEST(ExactSum, IsTheSameInAnyOrderAndInAnyParts) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 200; ++round) {
    std::vector<double> all = numbers(random, 200);
    ExactSum first;
    for (const double x : all) first.add(x);
    std::shuffle(all.begin(), all.end(), random);
    std::vector<ExactSum> parts(1 + random() % 7);
    for (const double x : all) parts[random() % parts.size()].add(x);
    ExactSum second;
    for (const ExactSum& part : parts) second.add(part);
    EXPECT_EQ(first.carried(), second.carried());
  }
}

}  // namespace
}  // namespace reef::kernels
