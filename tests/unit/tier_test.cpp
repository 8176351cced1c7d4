#include "reef/tier.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "reef/error.h"
#include "tier/disk.h"
#include "tier/extents.h"
#include "tier/swap_file.h"

namespace reef {
namespace {

using Bytes = std::vector<unsigned char>;

Bytes random_bytes(std::mt19937_64& random, std::size_t count) {
  Bytes bytes(count);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

std::string scratch() { return std::filesystem::temp_directory_path().string(); }

DiskTierOptions small_blocks(std::uint64_t capacity_bytes = 1 << 22) {
  return {.directory = scratch(), .capacity_bytes = capacity_bytes, .block_bytes = 8192, .threads = 3};
}

// ---- laws that every tier obeys
// -------------------------------------------------------------------------------------

using MakeTier = std::shared_ptr<Tier> (*)(std::uint64_t capacity_bytes);
struct EveryTier : testing::TestWithParam<std::pair<const char*, MakeTier>> {
  std::shared_ptr<Tier> make(std::uint64_t capacity_bytes) { return GetParam().second(capacity_bytes); }
};

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
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937_64 random(seed);
      for (int row = 0; row < 60; ++row) {
        const Bytes bytes = random_bytes(random, 1 + random() % 50000);
        Bytes back(bytes.size());
        const auto slot = tier->take(bytes.size());
        tier->write(*slot, bytes.data());
        tier->read(*slot, back.data());
        wrong += back != bytes;
        tier->give_back(*slot);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(tier->use().used_bytes, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Tiers, EveryTier,
    testing::Values(std::pair<const char*, MakeTier>{"host", [](std::uint64_t n) { return host_tier(n); }},
                    std::pair<const char*, MakeTier>{
                        "disk", [](std::uint64_t n) { return disk_tier(small_blocks(n)); }},
                    std::pair<const char*, MakeTier>{"disk_through_the_page_cache",
                                                     [](std::uint64_t n) {
                                                       DiskTierOptions options = small_blocks(n);
                                                       options.direct = false;
                                                       return disk_tier(options);
                                                     }}),
    [](const auto& tested) { return std::string(tested.param.first); });

// ---- the disk
// -------------------------------------------------------------------------------------------------------

struct FaultyFile : SwapFile {
  explicit FaultyFile(int fail_at, int error_number)
      : SwapFile(scratch(), true), fail_at_(fail_at), error_number_(error_number) {}
  bool fails() {
    if (calls_++ != fail_at_) return false;
    errno = error_number_;
    return true;
  }
  ssize_t sys_pwrite(const void* data, std::size_t bytes, off_t offset) override {
    return fails() ? -1 : SwapFile::sys_pwrite(data, bytes, offset);
  }
  ssize_t sys_pread(void* data, std::size_t bytes, off_t offset) override {
    return fails() ? -1 : SwapFile::sys_pread(data, bytes, offset);
  }
  int sys_fallocate(off_t offset, off_t bytes) override {
    return fails() ? error_number_ : SwapFile::sys_fallocate(offset, bytes);
  }
  int fail_at_;
  int error_number_;
  std::atomic<int> calls_{0};
};

TEST(DiskTier, EachFailingCallIsAnErrorThatSaysWhyAndTheTierGoesOn) {
  std::mt19937_64 random(5);
  const Bytes bytes = random_bytes(random, 40000);  // 5 blocks
  constexpr int kCalls = 1 + 5 + 5 + 5 + 5;         // reservation, then writes and reads, twice
  for (int fail_at = 0; fail_at <= kCalls; ++fail_at) {
    const auto tier = disk_tier_on(std::make_unique<FaultyFile>(fail_at, ENOSPC), small_blocks());
    int failures = 0;
    Bytes back(bytes.size());
    for (int attempt = 0; attempt < 2; ++attempt) {
      std::optional<Tier::Slot> slot;
      try {
        slot = tier->take(bytes.size());
        tier->write(*slot, bytes.data());
        tier->read(*slot, back.data());
        EXPECT_EQ(back, bytes);
      } catch (const FileError& error) {
        ++failures;
        EXPECT_EQ(error.error_number(), ENOSPC);
        EXPECT_NE(message_of(error).find("bytes are free"), std::string::npos) << message_of(error);
      }
      if (slot) tier->give_back(*slot);
    }
    EXPECT_EQ(failures, fail_at < kCalls ? 1 : 0) << "call " << fail_at;
    EXPECT_EQ(tier->use().used_bytes, 0);
  }
}

struct FlippedFile : SwapFile {
  FlippedFile() : SwapFile(scratch(), true) {}
  ssize_t sys_pread(void* data, std::size_t bytes, off_t offset) override {
    const ssize_t count = SwapFile::sys_pread(data, bytes, offset);
    if (offset == 8192) static_cast<unsigned char*>(data)[100] ^= 4;
    return count;
  }
};

TEST(DiskTier, AFlippedBitIsFound) {
  const auto tier = disk_tier_on(std::make_unique<FlippedFile>(), small_blocks());
  Bytes bytes(30000, 1);
  const auto slot = tier->take(bytes.size());
  tier->write(*slot, bytes.data());
  try {
    tier->read(*slot, bytes.data());
    FAIL() << "not found";
  } catch (const FileError& error) {
    EXPECT_NE(message_of(error).find("offset 8192"), std::string::npos) << message_of(error);
  }
}

struct SlowFile : SwapFile {
  SlowFile() : SwapFile(scratch(), false) {}
  ssize_t sys_pwrite(const void* data, std::size_t bytes, off_t offset) override {
    if (++calls % 3 == 0) {
      errno = EINTR;
      return -1;
    }
    return SwapFile::sys_pwrite(data, std::min<std::size_t>(bytes, 1000), offset);
  }
  std::atomic<int> calls{0};
};

TEST(DiskTier, ShortAndInterruptedTransfersAreFinished) {
  std::mt19937_64 random(6);
  const Bytes bytes = random_bytes(random, 30000);
  Bytes back(bytes.size());
  const auto tier = disk_tier_on(std::make_unique<SlowFile>(), small_blocks());
  const auto slot = tier->take(bytes.size());
  tier->write(*slot, bytes.data());
  tier->read(*slot, back.data());
  EXPECT_EQ(back, bytes);
}

TEST(DiskTier, LeavesNoFileBehindAndNoNameWhileItLives) {
  const auto directory = std::filesystem::temp_directory_path() / ("reef-tier-" + std::to_string(::getpid()));
  std::filesystem::create_directory(directory);
  {
    DiskTierOptions options = small_blocks();
    options.directory = directory.string();
    const auto tier = disk_tier(options);
    const Bytes bytes(5000, 3);
    tier->write(*tier->take(bytes.size()), bytes.data());
    EXPECT_TRUE(std::filesystem::is_empty(directory));
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory));
  std::filesystem::remove(directory);
}

TEST(DiskTier, RefusesWhatCannotWork) {
  DiskTierOptions options = small_blocks();
  options.directory = "/nowhere/at/all";
  EXPECT_THROW(disk_tier(options), FileError);
  options = small_blocks();
  options.block_bytes = 1000;
  EXPECT_THROW(disk_tier(options), ConfigError);
  options = small_blocks();
  options.threads = 0;
  EXPECT_THROW(disk_tier(options), ConfigError);
}

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
