#include "page/block_cache.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <vector>

namespace reef {
namespace {

constexpr std::size_t kMemoryPage = 4096;

bool mapped(void* data) {
  unsigned char there = 0;
  return ::mincore(data, kMemoryPage, &there) == 0;
}

constexpr std::size_t kBytes = 64 * kMemoryPage;

TEST(BlockCache, TheNextBlockTakesTheSmallestRangeThatFits) {
  BlockCache cache;
  auto* const large = static_cast<char*>(cache.allocate(3 * kBytes, 0));
  void* const between = cache.allocate(kMemoryPage, 0);
  void* const small = cache.allocate(2 * kBytes - 1, 0);
  EXPECT_TRUE(cache.free(large));
  EXPECT_TRUE(cache.free(small));
  EXPECT_EQ(cache.kept_bytes(), 5 * kBytes);
  EXPECT_EQ(cache.allocate(2 * kBytes, 0), small);
  EXPECT_EQ(cache.allocate(kBytes, 0), large);
  EXPECT_EQ(cache.allocate(2 * kBytes, 0), large + kBytes);
  EXPECT_EQ(cache.kept_bytes(), 0);
  for (void* data : {static_cast<void*>(large), static_cast<void*>(large + kBytes), between, small})
    EXPECT_TRUE(cache.free(data));
}

TEST(BlockCache, NeighboursBecomeOneAgain) {
  BlockCache cache;
  auto* const whole = static_cast<char*>(cache.allocate(3 * kBytes, 0));
  cache.free(whole);
  char* parts[3];
  for (char*& part : parts) part = static_cast<char*>(cache.allocate(kBytes, 0));
  for (const int i : {0, 2, 1}) EXPECT_TRUE(cache.free(parts[i]));
  EXPECT_EQ(cache.allocate(3 * kBytes, 0), whole);
  EXPECT_TRUE(cache.free(whole));
}

TEST(BlockCache, WhatIsTrimmedGoesBackToTheSystem) {
  BlockCache cache;
  auto* const data = static_cast<char*>(cache.allocate(kBytes, 0));
  cache.free(data);
  cache.trim(kBytes);
  EXPECT_TRUE(mapped(data + kBytes - kMemoryPage));
  cache.trim(kBytes - 1);
  EXPECT_EQ(cache.kept_bytes(), kBytes - kMemoryPage);
  EXPECT_TRUE(mapped(data));
  EXPECT_FALSE(mapped(data + kBytes - kMemoryPage));
  cache.trim(0);
  EXPECT_FALSE(mapped(data));
}

TEST(BlockCache, KnowsItsOwn) {
  BlockCache cache;
  alignas(kMemoryPage) char foreign[64];
  EXPECT_FALSE(cache.free(foreign));
  EXPECT_FALSE(cache.free(foreign + 1));
  EXPECT_FALSE(cache.free(nullptr));
  void* const own = cache.allocate(200'000, 0);
  EXPECT_TRUE(cache.free(own));
  EXPECT_FALSE(cache.free(own));  // kept, not in use
}

TEST(BlockCache, MoreThanTheSystemHasIsRefused) {
  BlockCache cache;
  EXPECT_EQ(cache.allocate(std::size_t{1} << 60, 0), nullptr);
}

// Whatever is asked of it: no two blocks share a byte, and no more is kept than was allowed.
TEST(BlockCache, BlocksAreWholeAndApart) {
  struct Block {
    std::size_t bytes;
    unsigned char mark;
  };
  for (unsigned seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    BlockCache cache;
    std::map<char*, Block> in_use;
    const auto whole = [](const auto& entry) {
      const auto& [data, block] = entry;
      return static_cast<unsigned char>(data[0]) == block.mark &&
             static_cast<unsigned char>(data[block.bytes - 1]) == block.mark;
    };
    for (int i = 0; i < 200; ++i) {
      const std::uint64_t kept_bytes = random() % 4 * 300'000;
      if (in_use.empty() || random() % 2 == 0) {
        const Block block{BlockCache::kSmallestBlock + random() % 5 * 50'000,
                          static_cast<unsigned char>(random())};
        auto* const data = static_cast<char*>(cache.allocate(block.bytes, kept_bytes));
        ASSERT_NE(data, nullptr);
        const auto after = in_use.lower_bound(data);
        ASSERT_TRUE(after == in_use.end() || data + block.bytes <= after->first);
        ASSERT_TRUE(after == in_use.begin() ||
                    std::prev(after)->first + std::prev(after)->second.bytes <= data);
        std::memset(data, block.mark, block.bytes);
        in_use.emplace(data, block);
      } else {
        const auto freed = std::next(in_use.begin(), static_cast<long>(random() % in_use.size()));
        ASSERT_TRUE(whole(*freed));
        ASSERT_TRUE(cache.free(freed->first));
        in_use.erase(freed);
        cache.trim(kept_bytes);
        ASSERT_LE(cache.kept_bytes(), kept_bytes);
      }
      ASSERT_TRUE(std::all_of(in_use.begin(), in_use.end(), whole));
    }
    for (const auto& entry : in_use) cache.free(entry.first);
  }
}

}  // namespace
}  // namespace reef
