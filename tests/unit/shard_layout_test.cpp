#include "reef/shard_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "support/config_error.h"

namespace reef {
namespace {

using Random = std::mt19937_64;

std::vector<ShardItem> random_items(Random& random) {
  constexpr std::int64_t kSizes[] = {0, 1, 3, 255, 256, 257, 512, 768, 1000, 4096, 70000};
  std::vector<ShardItem> items;
  for (std::uint64_t i = random() % 40; i-- > 0;) {
    const int kind = static_cast<int>(random() % 3);
    items.push_back({kSizes[random() % std::size(kSizes)], kind == 0 ? 2 : 4, kind});
  }
  return items;
}

TEST(ShardLayout, EveryElementIsInOneSliceAndSlicesOfABucketAreEqual) {
  Random random(1);
  for (int row = 0; row < 2000; ++row) {
    const std::vector<ShardItem> items = random_items(random);
    const int ranks = static_cast<int>(1 + random() % 9);
    const ShardLayout layout = plan_shards(items, ranks, std::int64_t{1} << (10 + random() % 10));
    std::vector<std::int64_t> reached(items.size(), 0);  // elements so far, in order
    for (std::size_t bucket = 0; bucket < layout.buckets.size(); ++bucket) {
      for (int rank = 0; rank < ranks; ++rank) {
        const std::int64_t begin = rank * layout.buckets[bucket].slice_elements;
        for (const ShardPiece& piece : layout.pieces(bucket, rank)) {
          ASSERT_EQ(piece.first, reached[piece.item]);
          ASSERT_GE(piece.offset, begin);
          ASSERT_LE(piece.offset + piece.elements, begin + layout.buckets[bucket].slice_elements);
          reached[piece.item] += piece.elements;
        }
      }
    }
    for (std::size_t i = 0; i < items.size(); ++i) ASSERT_EQ(reached[i], items[i].elements);
  }
}

// Whatever the number of copies: all slices of one before the first of the next.
TEST(ShardLayout, EveryCopyHasEverySliceOnce) {
  for (int slices = 1; slices <= 9; ++slices) {
    ShardLayout layout = plan_shards({{70000}, {3}}, slices, 1000);
    int rank = 0;
    for (int copy = 0; copy < 4; ++copy) {
      for (int slice = 0; slice < slices; ++slice, ++rank) {
        const ShardPlace place = layout.place_of(rank);
        ASSERT_EQ(place.copy, copy);
        ASSERT_EQ(place.slice, slice);
        for (std::size_t bucket = 0; bucket < layout.buckets.size(); ++bucket) {
          const std::int64_t begin = slice * layout.buckets[bucket].slice_elements;
          ASSERT_EQ(layout.begin(bucket, slice), begin);
          for (const ShardPiece& piece : layout.pieces(bucket, slice)) ASSERT_GE(piece.offset, begin);
        }
      }
    }
  }
}

// As many and in the same order on every rank: what it keeps, and nothing of what others keep.
TEST(ShardLayout, EveryRankHasAPartOfEveryItem) {
  Random random(4);
  for (int row = 0; row < 500; ++row) {
    const std::vector<ShardItem> items = random_items(random);
    const int ranks = static_cast<int>(1 + random() % 9);
    const ShardLayout layout = plan_shards(items, ranks, std::int64_t{1} << (10 + random() % 10));
    for (std::size_t bucket = 0; bucket < layout.buckets.size(); ++bucket) {
      const std::int64_t elements = layout.buckets[bucket].slice_elements;
      for (int rank = 0; rank < ranks; ++rank) {
        const std::vector<ShardPiece> parts = layout.parts(bucket, rank);
        const std::vector<ShardPiece> pieces = layout.pieces(bucket, rank);
        ASSERT_EQ(parts.size(), layout.buckets[bucket].items.size());
        std::size_t kept = 0;
        for (std::size_t i = 0; i < parts.size(); ++i) {
          ASSERT_EQ(parts[i].item, layout.buckets[bucket].items[i].item);
          ASSERT_GE(parts[i].offset, rank * elements);
          ASSERT_LE(parts[i].offset + parts[i].elements, (rank + 1) * elements);
          if (parts[i].elements == 0) continue;
          ASSERT_LT(kept, pieces.size());
          ASSERT_EQ(parts[i].offset, pieces[kept].offset);
          ASSERT_EQ(parts[i].first, pieces[kept].first);
          ASSERT_EQ(parts[i].elements, pieces[kept++].elements);
        }
        ASSERT_EQ(kept, pieces.size());
      }
    }
  }
}

TEST(ShardLayout, BlocksAreTheSameForAnyNumberOfRanks) {
  Random random(2);
  for (int row = 0; row < 500; ++row) {
    const std::vector<ShardItem> items = random_items(random);
    for (const int ranks : {1, 2, 3, 4, 8}) {
      const ShardLayout layout = plan_shards(items, ranks, 100000);
      for (std::size_t bucket = 0; bucket < layout.buckets.size(); ++bucket) {
        for (int rank = 0; rank < ranks; ++rank) {
          for (const ShardPiece& piece : layout.pieces(bucket, rank)) {
            ASSERT_EQ(piece.first % kShardAlignment, 0);
            const bool ends = piece.first + piece.elements == items[piece.item].elements;
            ASSERT_TRUE(ends || piece.elements % kShardAlignment == 0);
          }
        }
      }
    }
  }
}

TEST(ShardLayout, ItemsKeepTheirOrderAndNeverOverlap) {
  Random random(3);
  for (int row = 0; row < 1000; ++row) {
    const std::vector<ShardItem> items = random_items(random);
    const std::int64_t bucket_bytes = std::int64_t{1} << (10 + random() % 10);
    const ShardLayout layout = plan_shards(items, 4, bucket_bytes);
    std::size_t placed = 0;
    for (std::size_t b = 0; b < layout.buckets.size(); ++b) {
      const ShardBucket& bucket = layout.buckets[b];
      std::int64_t end = 0;
      std::size_t before = 0;
      for (const ShardPiece& item : bucket.items) {
        ASSERT_EQ(items[item.item].kind, bucket.kind);
        ASSERT_EQ(item.bucket, b);
        ASSERT_GE(item.offset, end);
        ASSERT_LT(item.offset, end + kShardAlignment) << "padding";
        ASSERT_TRUE(&item == bucket.items.data() || item.item > before);
        before = item.item;
        end = item.offset + item.elements;
        ++placed;
      }
      ASSERT_GE(layout.elements(b), end);
      ASSERT_LT(layout.elements(b), end + kShardAlignment + 4 * kShardAlignment);
      const std::int64_t bytes = end * items[bucket.items.front().item].element_bytes;
      const auto filled = std::count_if(bucket.items.begin(), bucket.items.end(),
                                        [](const ShardPiece& item) { return item.elements > 0; });
      ASSERT_TRUE(filled <= 1 || bytes <= bucket_bytes);
    }
    ASSERT_EQ(placed, items.size());
  }
}

TEST(ShardLayout, NothingIsPaddedWhereNothingMustBe) {
  const ShardLayout layout = plan_shards({{512}, {1536}, {2048}}, 4, 1 << 20);
  ASSERT_EQ(layout.buckets.size(), 1U);
  EXPECT_EQ(layout.elements(0), 4096);
}

TEST(ShardLayout, RefusesWhatCannotBe) {
  EXPECT_NE(test::config_error([] { plan_shards({{1}}, 0, 1); }).find("0 ranks"), std::string::npos);
  EXPECT_NE(test::config_error([] { plan_shards({{1}}, 1, 0); }).find("bucket_bytes 0"), std::string::npos);
  EXPECT_NE(test::config_error([] {
              plan_shards({{1}, {-1}}, 1, 1);
            }).find("item 1 of -1"),
            std::string::npos);
}

}  // namespace
}  // namespace reef
