// The largest elements of a sum, against a sort, for vectors of every kind; and merges of them.
#include "kernels/top_k.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "shard/sparse_gradient.h"

namespace reef {
namespace {

using kernels::is_larger;
using kernels::magnitude_bits;
using kernels::SparseEntry;
using kernels::take_largest;

using Values = std::vector<float>;

enum class Kind {
  kNormal,
  kManyMagnitudes,
  kFewValues,
  kMostlyZero,
  kNotFinite,
  kDecreasing,
  kPeriodic,
  kCount
};

Values values_of(Kind kind, std::size_t elements, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  Values values(elements);
  for (std::size_t i = 0; i < elements; ++i) {
    float& value = values[i];
    value = normal(random);
    switch (kind) {
      case Kind::kManyMagnitudes:
        value *= std::exp2(static_cast<float>(random() % 200) - 100.0F);
        break;
      case Kind::kFewValues:
        value = static_cast<float>(random() % 5) - 2.0F;
        break;
      case Kind::kMostlyZero:
        value *= random() % 50 == 0 ? 1.0F : 0.0F;
        break;
      case Kind::kNotFinite:
        if (random() % 7 == 0)
          value = random() % 2 == 0 ? std::nanf("") : -std::numeric_limits<float>::infinity();
        break;
      case Kind::kDecreasing:
        value = 1.0F / static_cast<float>(i + 1);
        break;
      case Kind::kPeriodic:
        value = i % 64 == 0 ? 100.0F + value : value;
        break;
      default:
        break;
    }
  }
  return values;
}

bool same(const std::vector<SparseEntry>& a, const std::vector<SparseEntry>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const SparseEntry& x, const SparseEntry& y) {
    return x.index == y.index && magnitude_bits(x.value) == magnitude_bits(y.value);
  });
}

bool by_index(const SparseEntry& a, const SparseEntry& b) { return a.index < b.index; }

struct Taken {
  std::vector<SparseEntry> entries;
  Values left;
};
Taken by_sort(const Values& gradient, const Values& residual, std::int64_t k) {
  Taken taken;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const float sum = residual.empty() ? gradient[i] : gradient[i] + residual[i];
    taken.left.push_back(sum);
    if (magnitude_bits(sum) != 0) taken.entries.push_back({static_cast<std::uint32_t>(i), sum});
  }
  std::sort(taken.entries.begin(), taken.entries.end(), is_larger);
  taken.entries.resize(std::min(taken.entries.size(), static_cast<std::size_t>(k)));
  for (const SparseEntry& entry : taken.entries) taken.left[entry.index] = 0;
  for (float& value : taken.left) value = std::isfinite(value) ? value : 0;
  std::sort(taken.entries.begin(), taken.entries.end(), by_index);
  return taken;
}

// Sizes around what is sampled and what is looked at together, every share, with and without a residual, and
// into memory of its own or the gradient's.
TEST(TopK, TakesWhatASortHasFirst) {
  std::mt19937_64 random(1);
  for (int kind = 0; kind < static_cast<int>(Kind::kCount); ++kind) {
    for (const std::size_t elements : {1, 2, 31, 32, 33, 1000, 16383, 16384, 16385, 50000}) {
      for (const double density : {1e-6, 0.001, 0.01, 0.1, 0.5, 0.999, 1.0}) {
        for (const bool has_residual : {false, true}) {
          const Values gradient = values_of(static_cast<Kind>(kind), elements, random);
          const Values residual = has_residual ? values_of(Kind::kNormal, elements, random) : Values();
          const auto k = static_cast<std::int64_t>(std::ceil(density * static_cast<double>(elements)));
          const Taken expected = by_sort(gradient, residual, k);
          for (const bool in_place : {false, true}) {
            Values from = gradient, other(elements);
            Values& left = in_place ? from : other;
            const auto entries = take_largest(from.data(), has_residual ? residual.data() : nullptr,
                                              left.data(), static_cast<std::int64_t>(elements), k);
            const std::string text = "kind " + std::to_string(kind) + ", " + std::to_string(elements) +
                                     " elements, k " + std::to_string(k);
            ASSERT_TRUE(same(entries, expected.entries)) << text;
            ASSERT_EQ(left, expected.left) << text;
          }
        }
      }
    }
  }
}

TEST(TopK, OfNothingIsNothing) {
  EXPECT_TRUE(take_largest(nullptr, nullptr, nullptr, 0, 5).empty());
  const Values zeros(100);
  Values left(100, 1.0F);
  EXPECT_TRUE(take_largest(zeros.data(), nullptr, left.data(), 100, 5).empty());
  EXPECT_EQ(left, zeros);
}

SparseGradient sparse(std::size_t most, std::uint32_t indices, std::mt19937_64& random) {
  std::map<std::uint32_t, float> values;
  for (std::size_t i = 0; i < most; ++i) {
    values[static_cast<std::uint32_t>(random() % indices)] =
        random() % 20 == 0 ? std::numeric_limits<float>::infinity() * (random() % 2 == 0 ? 1.0F : -1.0F)
                           : static_cast<float>(random() % 9) - 4.0F;
  }
  SparseGradient entries;
  for (const auto& [index, value] : values) entries.push_back({index, value});
  return entries;
}

// Either way around, by maps and a sort: kept are the largest, and nothing is lost.
TEST(TopK, MergesKeepTheLargestAndGiveTheRest) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 2000; ++i) {
    const auto most = static_cast<std::size_t>(random() % 40);
    const auto indices = static_cast<std::uint32_t>(1 + random() % 60);
    const SparseGradient a = sparse(most, indices, random), b = sparse(most, indices, random);
    const std::size_t k = random() % 30;
    std::map<std::uint32_t, float> sums;
    for (const auto* const each : {&a, &b}) {
      for (const SparseEntry& entry : *each) {
        const auto [place, is_new] = sums.try_emplace(entry.index, entry.value);
        if (!is_new) place->second += entry.value;
      }
    }
    SparseGradient all;
    for (const auto& [index, value] : sums) all.push_back({index, value});
    EXPECT_TRUE(same(sum_of({a, b}), all));
    std::sort(all.begin(), all.end(), is_larger);
    const auto last = all.begin() + static_cast<std::ptrdiff_t>(std::min(k, all.size()));
    SparseGradient kept(all.begin(), last), dropped(last, all.end());
    std::sort(kept.begin(), kept.end(), by_index);
    std::sort(dropped.begin(), dropped.end(), by_index);
    const MergedSparse merged = merge_largest(a, b, k), other_way = merge_largest(b, a, k);
    EXPECT_TRUE(same(merged.kept, kept));
    EXPECT_TRUE(same(merged.dropped, dropped));
    const auto bits = [](const SparseGradient& entries) {
      std::vector<std::uint64_t> words;
      for (const SparseEntry& each : entries) words.push_back(__builtin_bit_cast(std::uint64_t, each));
      return words;
    };
    EXPECT_EQ(bits(merged.kept), bits(other_way.kept));
    EXPECT_EQ(bits(merged.dropped), bits(other_way.dropped));
  }
}

}  // namespace
}  // namespace reef
