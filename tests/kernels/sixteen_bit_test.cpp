// Rounding to 16 bits in one pass, and sums of what was rounded: against LibTorch's operators one after
// another, and against the reference, bit for bit; the same bits from all instructions and threads.
#include "kernels/sixteen_bit.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/sixteen_bit/all_loops.h"

namespace reef::kernels {
namespace {

using at::Tensor;
using Floats = std::vector<float>;
using Codes = std::vector<std::uint16_t>;

struct Format {
  const char* name;
  at::ScalarType dtype;
  FloatFormat format;
  std::uint16_t infinity;
  const SixteenBitLoops& of(const SixteenBitKernels& kernels) const {
    return format == FloatFormat::kBFloat16 ? kernels.bfloat16 : kernels.float16;
  }
};
const std::vector<Format> kFormats = {{"bfloat16", at::kBFloat16, FloatFormat::kBFloat16, 0x7F80},
                                      {"float16", at::kHalf, FloatFormat::kFloat16, 0x7C00}};

std::int64_t size_of(const auto& values) { return static_cast<std::int64_t>(values.size()); }
Tensor tensor_of(const Floats& values) {
  return torch::from_blob(const_cast<float*>(values.data()), {size_of(values)});
}
Tensor tensor_of(const Codes& codes, at::ScalarType dtype) {
  return torch::from_blob(const_cast<std::uint16_t*>(codes.data()), {size_of(codes)}, dtype);
}
Floats floats_of(const Tensor& values) {
  const auto* const first = values.const_data_ptr<float>();
  return {first, first + values.numel()};
}
std::uint32_t bits(float value) { return __builtin_bit_cast(std::uint32_t, value); }

/// Bit for bit; of NaN there is one kind, since the order of an addition's operands decides which.
::testing::AssertionResult same(const Floats& found, const Floats& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (bits(found[i]) == bits(expected[i]) || (std::isnan(found[i]) && std::isnan(expected[i]))) continue;
    return ::testing::AssertionFailure() << "element " << i << ": " << found[i] << ", not " << expected[i];
  }
  return ::testing::AssertionSuccess();
}

/// Any bits at all: one value in 256 is an infinity or NaN, and one in 256 subnormal.
Floats any_bits(std::size_t elements, unsigned seed) {
  std::mt19937 random(seed);
  Floats values(elements);
  for (float& value : values) value = __builtin_bit_cast(float, static_cast<std::uint32_t>(random()));
  return values;
}
/// Of the magnitudes of gradients: in float16 normal, subnormal, and nothing.
Floats gradients(std::size_t elements, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats values(elements);
  for (float& value : values) value = normal(random) * std::exp2(static_cast<float>(random() % 44) - 32.0F);
  return values;
}
Codes any_codes(std::size_t elements, unsigned seed) {
  std::mt19937 random(seed);
  Codes codes(elements);
  for (std::uint16_t& code : codes) code = static_cast<std::uint16_t>(random());
  return codes;
}
Codes every_code() {
  Codes codes(0x10000);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint16_t>(i);
  return codes;
}

/// Of each of the 2^16 patterns: its value, the one halfway to the next, and the float32 next to these. What
/// comes after the largest number is an infinity from halfway on to the number that there would be.
Floats around_every_pattern(const Format& format) {
  const Tensor all = tensor_of(every_code(), format.dtype).to(at::kDouble);
  const auto* const value = all.const_data_ptr<double>();
  Floats values;
  for (std::size_t pattern = 0; pattern < 0x8000; ++pattern) {
    const double next = value[(pattern + 1) & 0x7FFF];
    const double step =
        std::isfinite(next) || pattern == 0 ? next - value[pattern] : value[pattern] - value[pattern - 1];
    for (const double exact : {value[pattern], value[pattern] + step / 2}) {
      const auto middle = static_cast<float>(exact);
      const float infinity = std::numeric_limits<float>::infinity();
      for (const float each : {std::nextafter(middle, -infinity), middle, std::nextafter(middle, infinity)}) {
        values.push_back(each);
        values.push_back(-each);
      }
    }
  }
  return values;
}

struct Rounded {
  Codes codes;
  Floats left;
  bool nonfinite = false;
};
void expect_same(const Rounded& found, const Rounded& expected, const std::string& text) {
  EXPECT_EQ(found.codes, expected.codes) << text;
  EXPECT_TRUE(same(found.left, expected.left)) << text;
  EXPECT_EQ(found.nonfinite, expected.nonfinite) << text;
}

/// What an exchange made of operators.
Rounded by_operators(const Format& format, const Floats& values, const Floats* before) {
  const Tensor left =
      before == nullptr ? tensor_of(values).clone() : tensor_of(values).add(tensor_of(*before));
  const Tensor sent = left.to(format.dtype);
  left.sub_(sent).nan_to_num_(0, 0, 0);
  Rounded found{Codes(values.size()), floats_of(left), !sent.isfinite().all().item<bool>()};
  std::memcpy(found.codes.data(), sent.const_data_ptr(), found.codes.size() * sizeof found.codes[0]);
  return found;
}

/// By a function of sixteen_bit.h, or by loops.
template <class Round>
Rounded rounded(const Round& round, const Floats& values, const Floats* before) {
  Rounded found{Codes(values.size()), Floats(values.size())};
  found.nonfinite = round(values.data(), before == nullptr ? nullptr : before->data(), size_of(values),
                          found.codes.data(), found.left.data());
  return found;
}
Rounded by_kernel(const Format& format, const Floats& values, const Floats* before) {
  return rounded(
      [&](const float* from, const float* with, std::int64_t elements, std::uint16_t* to, float* left) {
        return round_to_sixteen_bits(from, with, elements, format.format, to, left);
      },
      values, before);
}
Rounded by_reference(const Format& format, const Floats& values, const Floats* before) {
  return rounded(
      [&](const float* from, const float* with, std::int64_t elements, std::uint16_t* to, float* left) {
        return reference::round_to_sixteen_bits(from, with, elements, format.format, to, left);
      },
      values, before);
}

/// With one kind of NaN. Of two that are added any may come out, and only LibTorch's vectors make those of
/// the kernel.
Rounded with_one_nan(const Format& format, Rounded of) {
  for (std::uint16_t& code : of.codes) code = (code & 0x7FFF) > format.infinity ? 0xFFFF : code;
  return of;
}

/// Against all that there is.
void expect_rounded(const Format& format, const Floats& values, const Floats* before,
                    const std::string& text) {
  const bool exactly = before == nullptr && at::get_cpu_capability().starts_with("AVX");
  const auto told = [&](const Rounded& of) { return exactly ? of : with_one_nan(format, of); };
  const Rounded expected = told(by_operators(format, values, before));
  expect_same(told(by_kernel(format, values, before)), expected, text + " by the kernel");
  expect_same(told(by_reference(format, values, before)), expected, text + " by the reference");
  expect_same(told(rounded(format.of(kSixteenBit).round, values, before)), expected,
              text + " by any processor");
  if (const SixteenBitKernels* const fast = sixteen_bit_kernels_with_avx2())
    expect_same(told(rounded(format.of(*fast).round, values, before)), expected, text + " by AVX2");
}

class SixteenBit : public ::testing::TestWithParam<Format> {};

TEST_P(SixteenBit, RoundsAroundEveryPatternAsLibTorchDoes) {
  const Floats values = around_every_pattern(GetParam());
  EXPECT_EQ(values.size(), 6U * 0x10000);
  expect_rounded(GetParam(), values, nullptr, "alone");
  const Floats zeros(values.size()), minus(values.size(), -0.0F);
  expect_rounded(GetParam(), values, &zeros, "with zeros");
  expect_rounded(GetParam(), values, &minus, "with zeros below");
  // The sum is what is rounded: halves of it, and of both signs.
  Floats halves = values;
  for (float& half : halves) half /= 2;
  expect_rounded(GetParam(), halves, &halves, "in halves");
  Floats opposite = values;
  for (float& value : opposite) value = -value;
  expect_rounded(GetParam(), values, &opposite, "with their opposites");
}

TEST_P(SixteenBit, RoundsAnyBitsAsLibTorchDoes) {
  for (unsigned seed = 0; seed < 4; ++seed) {
    const Floats values = any_bits(1 << 20, seed), before = any_bits(1 << 20, seed + 100);
    expect_rounded(GetParam(), values, nullptr, "any bits");
    expect_rounded(GetParam(), values, &before, "any bits with others");
  }
  const Floats values = gradients(1 << 20, 7);
  const Rounded first = by_kernel(GetParam(), values, nullptr);
  expect_rounded(GetParam(), gradients(1 << 20, 8), &first.left, "gradients");
  EXPECT_FALSE(first.nonfinite);
}

/// Elements before and behind, which nobody may touch.
constexpr std::size_t kBeside = 64;

// Where each array begins and ends, whatever the number of elements.
TEST_P(SixteenBit, StaysWithinEverySizeAndBeginsAnywhere) {
  std::vector<std::size_t> sizes;
  for (std::size_t size = 0; size <= 70; ++size) sizes.push_back(size);
  for (const std::size_t limit : {128U, 2048U, 4096U, 1U << 15, 1U << 16}) {
    for (const std::size_t size : {limit - 1, limit + 0, limit + 1}) sizes.push_back(size);
  }
  sizes.push_back(5 * (1U << 15) + 37);
  for (const std::size_t size : sizes) {
    const std::size_t most = size > 128 ? 2 : 17;
    for (std::size_t skip = 0; skip < most; ++skip) {
      const Floats all = gradients(size + kBeside, static_cast<unsigned>(size)),
                   more = any_bits(all.size(), 3);
      // Each array begins elsewhere.
      const std::size_t skips[] = {skip, (3 * skip + 1) % 17, (5 * skip + 2) % 17, (7 * skip + 3) % 17};
      const Floats values(all.begin() + static_cast<std::ptrdiff_t>(skips[0]),
                          all.begin() + static_cast<std::ptrdiff_t>(skips[0] + size));
      const Floats before(more.begin() + static_cast<std::ptrdiff_t>(skips[1]),
                          more.begin() + static_cast<std::ptrdiff_t>(skips[1] + size));
      for (const bool with : {false, true}) {
        const Rounded expected = by_reference(GetParam(), values, with ? &before : nullptr);
        Codes codes(size + kBeside, 0x5A5A);
        Floats left(size + kBeside, 77);
        const bool nonfinite = round_to_sixteen_bits(
            all.data() + skips[0], with ? more.data() + skips[1] : nullptr, static_cast<std::int64_t>(size),
            GetParam().format, codes.data() + skips[2], left.data() + skips[3]);
        Codes expected_codes(codes.size(), 0x5A5A);
        Floats expected_left(left.size(), 77);
        std::copy(expected.codes.begin(), expected.codes.end(), expected_codes.begin() + skips[2]);
        std::copy(expected.left.begin(), expected.left.end(), expected_left.begin() + skips[3]);
        ASSERT_EQ(codes, expected_codes) << size << " elements, from " << skip;
        ASSERT_TRUE(same(left, expected_left)) << size << " elements, from " << skip;
        ASSERT_EQ(nonfinite, expected.nonfinite) << size << " elements, from " << skip;
      }
    }
  }
}

// Of one that is not finite among many, and of none: the largest number is finite, the next one is not.
TEST_P(SixteenBit, TellsOfWhatIsNotFiniteWhereverItIs) {
  const auto number = [&](int code) {
    return tensor_of(Codes{static_cast<std::uint16_t>(code)}, GetParam().dtype).to(at::kFloat).item<float>();
  };
  const float largest = number(GetParam().infinity - 1);
  const float halfway = largest + (largest - number(GetParam().infinity - 2)) / 2;
  const float infinity = std::numeric_limits<float>::infinity();
  for (const std::size_t size : {1U, 33U, 2050U, (1U << 15) + 5}) {
    Floats values(size, largest), before(size);
    EXPECT_FALSE(by_kernel(GetParam(), values, nullptr).nonfinite);
    EXPECT_FALSE(by_kernel(GetParam(), values, &before).nonfinite);
    const std::size_t step = size > 100 ? size / 29 : 1;
    for (std::size_t at = 0; at < size; at += step) {
      for (const float wrong : {std::nanf(""), -std::nanf(""), infinity, -infinity, halfway, -halfway}) {
        values[at] = wrong;
        EXPECT_TRUE(by_kernel(GetParam(), values, nullptr).nonfinite) << at << " of " << size;
        const Rounded found = by_kernel(GetParam(), values, &before);
        EXPECT_TRUE(found.nonfinite) << at << " of " << size;
        EXPECT_EQ(bits(found.left[at]), 0U);
        values[at] = largest;
      }
      before[at] = halfway - largest;  // which of them is too large does not matter
      EXPECT_TRUE(by_kernel(GetParam(), values, &before).nonfinite) << at << " of " << size;
      before[at] = 0;
    }
  }
}

Tensor sum_by_operators(const Format& format, const std::vector<Codes>& parts, int divisor) {
  Tensor sum = torch::empty({size_of(parts[0])});
  sum.copy_(tensor_of(parts[0], format.dtype));
  for (std::size_t part = 1; part < parts.size(); ++part) sum.add_(tensor_of(parts[part], format.dtype));
  if (divisor != 1) sum.div_(divisor);
  return sum;
}
std::vector<const std::uint16_t*> pointers(const std::vector<Codes>& parts) {
  std::vector<const std::uint16_t*> all;
  for (const Codes& part : parts) all.push_back(part.data());
  return all;
}

TEST_P(SixteenBit, EveryPatternHasItsValue) {
  const std::vector<Codes> all = {every_code()};
  for (const int divisor : {1, 2, 3, 7, 8, 1000}) {
    const Floats expected = floats_of(sum_by_operators(GetParam(), all, divisor));
    Floats found(expected.size());
    sum_of_sixteen_bits(pointers(all), size_of(found), GetParam().format, divisor, found.data());
    EXPECT_TRUE(same(found, expected)) << divisor;
  }
}

TEST_P(SixteenBit, SumsAreInTheOrderOfTheirParts) {
  for (const std::size_t size : {0U, 1U, 7U, 31U, 2047U, 2048U, 2049U, (1U << 15) + 1, 100003U}) {
    for (const int count : {1, 2, 3, 5, 8}) {
      std::vector<Codes> parts;
      for (int part = 0; part < count; ++part) {
        // Among any patterns some that are alike: sums that cancel.
        parts.push_back(part == 3 ? parts[0] : any_codes(size, static_cast<unsigned>(part)));
      }
      for (const int divisor : {1, 2, 3, 5, 64}) {
        const Floats expected = floats_of(sum_by_operators(GetParam(), parts, divisor));
        const std::string text =
            std::to_string(size) + " of " + std::to_string(count) + " over " + std::to_string(divisor);
        Floats found(size + 2, 77);
        sum_of_sixteen_bits(pointers(parts), size_of(expected), GetParam().format, divisor, &found[1]);
        EXPECT_EQ(found.front() + found.back(), 154) << "written beyond the ends: " << text;
        EXPECT_TRUE(same({found.begin() + 1, found.end() - 1}, expected)) << text;
        Floats by(size);
        reference::sum_of_sixteen_bits(pointers(parts), size_of(expected), GetParam().format, divisor,
                                       by.data());
        EXPECT_TRUE(same(by, expected)) << text << " by the reference";
        for (const SixteenBitKernels* const kernels : {&kSixteenBit, sixteen_bit_kernels_with_avx2()}) {
          if (kernels == nullptr) continue;
          GetParam().of(*kernels).sum(pointers(parts).data(), count, 0, size_of(by), divisor, by.data());
          EXPECT_TRUE(same(by, expected)) << text;
        }
      }
    }
  }
}

TEST_P(SixteenBit, TheSameFromAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  const std::size_t size = 11 * (1 << 15) + 3;
  const Floats values = any_bits(size, 1), before = gradients(size, 2);
  const std::vector<Codes> parts = {any_codes(size, 3), any_codes(size, 4), any_codes(size, 5)};
  const Rounded expected = by_reference(GetParam(), values, &before);
  Floats expected_sum(size);
  reference::sum_of_sixteen_bits(pointers(parts), size_of(values), GetParam().format, 3, expected_sum.data());
  for (const int count : {1, 2, 3, 7, 16}) {
    at::set_num_threads(count);
    const std::string text = std::to_string(count) + " threads";
    expect_same(by_kernel(GetParam(), values, &before), expected, text);
    Floats sum(size);
    sum_of_sixteen_bits(pointers(parts), size_of(sum), GetParam().format, 3, sum.data());
    EXPECT_TRUE(same(sum, expected_sum)) << text;
  }
  at::set_num_threads(threads);
}

INSTANTIATE_TEST_SUITE_P(Formats, SixteenBit, ::testing::ValuesIn(kFormats),
                         [](const auto& row) { return std::string(row.param.name); });

}  // namespace
}  // namespace reef::kernels
