// The largest elements of a sum, against a sort, for vectors of every kind, on the CPU and as warps find
// them; and merges of them.
#include "kernels/top_k.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kernels/top_k/warp.h"
#include "kernels/top_k_by_warps.h"
#include "kernels/top_k_vectors.h"
#include "shard/sparse_gradient.h"

namespace reef {
namespace {

using kernels::is_larger;
using kernels::magnitude_bits;
using kernels::SparseEntry;
using kernels::take_largest;
using kernels::take_largest_by_warps;

using top_k_vectors::by_index;
using top_k_vectors::by_sort;
using top_k_vectors::each_vector;
using top_k_vectors::same;
using top_k_vectors::Taken;
using top_k_vectors::Values;

const float* data_or_null(const Values& values) { return values.empty() ? nullptr : values.data(); }

// Into memory of its own and into the gradient's.
TEST(TopK, TakesWhatASortHasFirst) {
  each_vector([](const Values& gradient, const Values& residual, std::int64_t k, const std::string& text) {
    const Taken expected = by_sort(gradient, residual, k);
    for (const bool in_place : {false, true}) {
      Values from = gradient, other(gradient.size());
      Values& left = in_place ? from : other;
      const auto entries = take_largest(from.data(), data_or_null(residual), left.data(),
                                        static_cast<std::int64_t>(gradient.size()), k);
      ASSERT_TRUE(same(entries, expected.entries)) << text;
      ASSERT_EQ(left, expected.left) << text;
    }
  });
}

// As on CUDA, in any division into parts and in any order of warps: the same entries, in the same order, and
// the same rest, bit for bit.
TEST(TopK, WarpsTakeTheSame) {
  std::mt19937_64 random(3);
  each_vector([&](const Values& gradient, const Values& residual, std::int64_t k, const std::string& text) {
    const auto elements = static_cast<std::int64_t>(gradient.size());
    const Taken expected = by_sort(gradient, residual, k);
    const std::int64_t most = kernels::top_k::parts_of(elements);
    for (const bool in_place : {false, true}) {
      const std::int64_t parts =
          in_place ? 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most)) : most;
      Values from = gradient, other(gradient.size());
      Values& left = in_place ? from : other;
      const auto entries = take_largest_by_warps(from.data(), data_or_null(residual), left.data(), elements,
                                                 k, parts, random());
      ASSERT_TRUE(same(entries, expected.entries)) << text << ", " << parts << " parts";
      ASSERT_EQ(left, expected.left) << text << ", " << parts << " parts";
    }
  });
}

// More tiles than there may be parts, each of which then has several; many elements are equal to the k-th.
TEST(TopK, WarpsOfManyTilesTakeTheSame) {
  const std::int64_t elements = 2 * kernels::top_k::kMostParts * kernels::top_k::kTile + 12345;
  ASSERT_EQ(kernels::top_k::parts_of(elements), kernels::top_k::kMostParts);
  std::mt19937_64 random(4);
  Values values(static_cast<std::size_t>(elements));
  for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 2001) - 1000);
  for (const std::int64_t k : {std::int64_t{1}, elements / 1000, elements / 3}) {
    Values left(values.size()), left_by_warps(values.size());
    const auto expected = take_largest(values.data(), nullptr, left.data(), elements, k);
    const auto entries = take_largest_by_warps(values.data(), nullptr, left_by_warps.data(), elements, k,
                                               kernels::top_k::kMostParts, random());
    EXPECT_TRUE(same(entries, expected)) << k;
    EXPECT_EQ(left_by_warps, left) << k;
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
