#include "reef/tier.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <random>
#include <vector>

#include "support/round_trips.h"
#include "support/tampered_file.h"
#include "tier/arena.h"
#include "tier/disk.h"
#include "tier/extents.h"

namespace reef {
namespace {

using test::Bytes;
using test::random_bytes;
using test::round_trips;

// ---- laws that every tier obeys
// -------------------------------------------------------------------------------------

using test::Way;

std::shared_ptr<Tier> small_blocks(std::uint64_t capacity_bytes, Way way, int blocks, bool direct) {
  const DiskTierOptions options{.directory = "",
                                .capacity_bytes = capacity_bytes,
                                .block_bytes = 8192,
                                .threads = blocks,
                                .io = test::io_of(way)};
  return disk_tier_on(std::make_unique<test::TamperedFile>(way, direct), options);
}

struct Kind {
  std::string name;
  Way way = Way::kThreads;
  int blocks = 0;  ///< on disk
  bool direct = true;
};

struct EveryTier : testing::TestWithParam<Kind> {
  void SetUp() override {
    if (const std::string why = test::obstacle(GetParam().way); !why.empty()) GTEST_SKIP() << why;
  }
  std::shared_ptr<Tier> make(std::uint64_t capacity_bytes) {
    const Kind& kind = GetParam();
    if (kind.name == "host") return host_tier(capacity_bytes);
    if (kind.name == "arena") {
      // As page-locked memory is taken, from the heap.
      return arena_tier(
          {.name = "arena", .capacity_bytes = capacity_bytes, .segment_bytes = 1 << 16},
          {[](std::size_t bytes) { return std::malloc(bytes); }, [](void* data) { std::free(data); }});
    }
    return small_blocks(capacity_bytes, kind.way, kind.blocks, kind.direct);
  }
};

std::vector<Kind> every_kind() {
  std::vector<Kind> kinds{{.name = "host"}, {.name = "arena"}};
  for (const Way way : test::kWays) {
    const std::string disk = std::string("disk_by_") + test::name_of(way);
    kinds.push_back({disk, way, 3, true});
    kinds.push_back({disk + "_one_block_at_a_time", way, 1, true});
    kinds.push_back({disk + "_through_the_page_cache", way, 3, false});
  }
  return kinds;
}

INSTANTIATE_TEST_SUITE_P(Tiers, EveryTier, testing::ValuesIn(every_kind()),
                         [](const auto& tested) { return tested.param.name; });

TEST_P(EveryTier, GivesBackWhatItWasGiven) {
  std::mt19937_64 random(1);
  const auto tier = make(1 << 22);
  std::map<Tier::Slot, Bytes> kept;
  for (int row = 0; row < 600; ++row) {
    if (kept.empty() || random() % 3 != 0) {
      const std::size_t sizes[] = {1, 4095, 4096, 4097, 8191, 8192, 8193, 1 + random() % 60000};
      const Bytes bytes = random_bytes(random, sizes[random() % std::size(sizes)]);
      const auto slot = tier->take(bytes.size());
      if (!slot) continue;
      tier->write(*slot, bytes.data());
      kept.emplace(*slot, bytes);
    } else {
      auto page = kept.begin();
      std::advance(page, static_cast<std::ptrdiff_t>(random() % kept.size()));
      for (int again = 0; again < 2; ++again) {
        Bytes back(page->second.size());
        tier->read(page->first, back.data());
        ASSERT_EQ(back, page->second);
        page->second = random_bytes(random, back.size());  // written over in place
        tier->write(page->first, page->second.data());
      }
      tier->give_back(page->first);
      kept.erase(page);
    }
    ASSERT_LE(tier->use().used_bytes, tier->use().capacity_bytes);
  }
  for (const auto& [slot, bytes] : kept) {
    Bytes back(bytes.size());
    tier->read(slot, back.data());
    ASSERT_EQ(back, bytes);
    tier->give_back(slot);
  }
  EXPECT_EQ(tier->use().used_bytes, 0);
}

TEST_P(EveryTier, IsFullAtItsCapacityAndNotBefore) {
  const auto tier = make(3 * 4096);
  const auto first = tier->take(4096);
  const auto second = tier->take(8192);
  ASSERT_TRUE(first && second);
  EXPECT_FALSE(tier->take(1));
  tier->give_back(*first);
  EXPECT_FALSE(tier->take(4097));
  EXPECT_TRUE(tier->take(4096));
}

TEST_P(EveryTier, CountsWhatMoved) {
  const auto tier = make(1 << 20);
  const Bytes bytes(10000, 7);
  Bytes back(10000);
  const auto slot = tier->take(bytes.size());
  tier->write(*slot, bytes.data());
  tier->read(*slot, back.data());
  tier->read(*slot, back.data());
  EXPECT_EQ(tier->use().written_bytes, 10000);
  EXPECT_EQ(tier->use().read_bytes, 20000);
}

TEST_P(EveryTier, ServesManyThreads) {
  const auto tier = make(1 << 24);
  std::atomic<int> wrong{0};
  round_trips(*tier, 4, 60, [&](const auto& trip) { wrong += !trip(); });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(tier->use().used_bytes, 0);
}

// ---- free ranges of a file
// ------------------------------------------------------------------------------------------

// Against a bitmap.
TEST(Extents, NeverOverlapAndJoinAgain) {
  std::mt19937_64 random(7);
  for (int row = 0; row < 200; ++row) {
    Extents extents;
    std::vector<bool> used(4000);
    std::map<std::uint64_t, std::uint64_t> taken;
    for (int i = 0; i < 100; ++i) {
      if (taken.empty() || random() % 2) {
        const std::uint64_t bytes = 1 + random() % 30;
        std::uint64_t lowest = 0;  // the oracle: first run of `bytes` free cells
        for (std::uint64_t run = 0, at = 0; run < bytes; ++at) {
          run = used[at] ? 0 : run + 1;
          lowest = at + 1 - run;
        }
        const std::uint64_t offset = extents.take(bytes);
        ASSERT_EQ(offset, lowest);
        for (std::uint64_t at = offset; at < offset + bytes; ++at) used[at] = true;
        taken.emplace(offset, bytes);
      } else {
        auto one = taken.begin();
        std::advance(one, static_cast<std::ptrdiff_t>(random() % taken.size()));
        for (std::uint64_t at = one->first; at < one->first + one->second; ++at) used[at] = false;
        extents.give_back(one->first, one->second);
        taken.erase(one);
      }
      std::uint64_t end = 0;
      for (const auto& [offset, bytes] : taken) end = offset + bytes;
      ASSERT_EQ(extents.end(), end);
    }
  }
}

}  // namespace
}  // namespace reef
