// What only the disk can do wrong, for every way of moving blocks.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "reef/error.h"
#include "reef/tier.h"
#include "support/round_trips.h"
#include "support/tampered_file.h"
#include "tier/disk.h"

namespace reef {
namespace {

using test::Bytes;
using test::random_bytes;
using test::round_trips;
using test::TamperedFile;
using test::Way;

std::string scratch() { return std::filesystem::temp_directory_path().string(); }

DiskTierOptions small_blocks(DiskIo io = DiskIo::kAutomatic) {
  return {.directory = scratch(), .capacity_bytes = 1 << 22, .block_bytes = 8192, .threads = 3, .io = io};
}

struct DiskTier : testing::TestWithParam<Way> {
  void SetUp() override {
    if (const std::string why = test::obstacle(GetParam()); !why.empty()) GTEST_SKIP() << why;
  }
  std::shared_ptr<Tier> tier_on(std::unique_ptr<SwapFile> file) {
    return disk_tier_on(std::move(file), small_blocks(test::io_of(GetParam())));
  }
};
INSTANTIATE_TEST_SUITE_P(Ways, DiskTier, testing::ValuesIn(test::kWays),
                         [](const auto& tested) { return std::string(test::name_of(tested.param)); });

struct FaultyFile : TamperedFile {
  FaultyFile(Way way, int fail_at, int error_number)
      : TamperedFile(way), fail_at_(fail_at), error_number_(error_number) {}
  ssize_t answer(const Call& /*call*/, ssize_t result) override {
    return calls_++ == fail_at_ ? -error_number_ : result;
  }
  int sys_fallocate(off_t offset, off_t bytes) override {
    return calls_++ == fail_at_ ? error_number_ : SwapFile::sys_fallocate(offset, bytes);
  }
  int fail_at_;
  int error_number_;
  std::atomic<int> calls_{0};
};

TEST_P(DiskTier, EachFailingCallIsAnErrorThatSaysWhyAndTheTierGoesOn) {
  std::mt19937_64 random(5);
  const Bytes bytes = random_bytes(random, 40000);  // 5 blocks
  constexpr int kCalls = 1 + 5 + 5 + 5 + 5;         // reservation, then writes and reads, twice
  for (const int error_number : {ENOSPC, EIO}) {
    for (int fail_at = 0; fail_at <= kCalls; ++fail_at) {
      const auto tier = tier_on(std::make_unique<FaultyFile>(GetParam(), fail_at, error_number));
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
          EXPECT_EQ(error.error_number(), error_number);
          EXPECT_NE(message_of(error).find("bytes are free"), std::string::npos) << message_of(error);
        }
        if (slot) tier->give_back(*slot);
      }
      EXPECT_EQ(failures, fail_at < kCalls ? 1 : 0) << "call " << fail_at;
      EXPECT_EQ(tier->use().used_bytes, 0);
    }
  }
}

struct FlippedFile : TamperedFile {
  using TamperedFile::TamperedFile;
  ssize_t answer(const Call& call, ssize_t result) override {
    if (!call.writes && call.offset == 8192) static_cast<unsigned char*>(call.data)[100] ^= 4;
    return result;
  }
};

TEST_P(DiskTier, AFlippedBitIsFound) {
  const auto tier = tier_on(std::make_unique<FlippedFile>(GetParam()));
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

struct SlowFile : TamperedFile {
  explicit SlowFile(Way way) : TamperedFile(way, false) {}
  ssize_t answer(const Call& /*call*/, ssize_t result) override {
    return ++calls_ % 3 == 0 ? -EINTR : std::min<ssize_t>(result, 1000);
  }
  std::atomic<int> calls_{0};
};

TEST_P(DiskTier, ShortAndInterruptedTransfersAreFinished) {
  std::mt19937_64 random(6);
  const Bytes bytes = random_bytes(random, 30000);
  Bytes back(bytes.size());
  const auto tier = tier_on(std::make_unique<SlowFile>(GetParam()));
  const auto slot = tier->take(bytes.size());
  tier->write(*slot, bytes.data());
  tier->read(*slot, back.data());
  EXPECT_EQ(back, bytes);
}

// A disk that is full, or a file that ends too early, says so by moving nothing.
struct StuckFile : TamperedFile {
  StuckFile(Way way, bool writes) : TamperedFile(way), writes_(writes) {}
  ssize_t answer(const Call& call, ssize_t result) override { return call.writes == writes_ ? 0 : result; }
  bool writes_;
};

TEST_P(DiskTier, ATransferOfNothingIsAnError) {
  const Bytes bytes(30000, 1);
  Bytes back(bytes.size());
  for (const bool writes : {true, false}) {
    const auto tier = tier_on(std::make_unique<StuckFile>(GetParam(), writes));
    const auto slot = tier->take(bytes.size());
    try {
      tier->write(*slot, bytes.data());
      tier->read(*slot, back.data());
      FAIL() << "not found";
    } catch (const FileError& error) {
      EXPECT_EQ(error.error_number(), writes ? ENOSPC : EIO);
    }
  }
}

struct UnreliableFile : TamperedFile {
  using TamperedFile::TamperedFile;
  ssize_t answer(const Call& call, ssize_t result) override {
    switch (calls_++ % 23) {
      case 5:
        return -EIO;
      case 11:
        return -EINTR;
      case 17:
        return std::min<ssize_t>(result, 4096);
      case 21:
        if (!call.writes) static_cast<unsigned char*>(call.data)[7] ^= 1;
        return result;
      default:
        return result;
    }
  }
  std::atomic<unsigned> calls_{0};
};

TEST_P(DiskTier, ErrorsOfOneThreadAreNotThoseOfAnother) {
  const auto tier = tier_on(std::make_unique<UnreliableFile>(GetParam()));
  std::atomic<int> wrong{0}, failed{0}, right{0};
  round_trips(*tier, 5, 100, [&](const auto& trip) {
    try {
      ++(trip() ? right : wrong);
    } catch (const FileError&) {
      ++failed;
    }
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(failed, 0);
  EXPECT_GT(right, 0);
  EXPECT_EQ(tier->use().used_bytes, 0);
}

// Pages of all lengths written, some over others; what the file holds in the end.
Bytes file_after_writes(Way way, std::uint64_t block_bytes) {
  DiskTierOptions options = small_blocks(test::io_of(way));
  options.block_bytes = block_bytes;
  auto owned = std::make_unique<TamperedFile>(way);
  TamperedFile& file = *owned;
  const auto tier = disk_tier_on(std::move(owned), options);
  std::mt19937_64 random(8);
  std::map<Tier::Slot, std::size_t> kept;
  std::uint64_t end = 0;
  for (int row = 0; row < 60; ++row) {
    if (row % 4 == 3) {
      tier->give_back(kept.begin()->first);
      kept.erase(kept.begin());
    }
    const Bytes bytes = random_bytes(random, 1 + random() % 60000);
    const auto slot = tier->take(bytes.size());
    tier->write(*slot, bytes.data());
    kept.emplace(*slot, bytes.size());
    end = std::max(end, tier->use().peak_bytes);  // the file is at least as long
  }
  Bytes content(end + SwapFile::kAlignment);
  char* block =
      reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(content.data()) + 4095) / 4096 * 4096);
  file.read(block, end, 0);
  return {block, block + end};
}

TEST_P(DiskTier, TheFileHoldsTheSameBytes) {
  for (const std::uint64_t block_bytes : {4096, 8192, 65536}) {
    EXPECT_EQ(file_after_writes(GetParam(), block_bytes), file_after_writes(Way::kThreads, 8192));
  }
}

TEST_P(DiskTier, LeavesNoFileBehindAndNoNameWhileItLives) {
  const auto directory = std::filesystem::temp_directory_path() / ("reef-tier-" + std::to_string(::getpid()));
  std::filesystem::create_directory(directory);
  if (GetParam() != Way::kUringPretended) {
    DiskTierOptions options = small_blocks(test::io_of(GetParam()));
    options.directory = directory.string();
    const auto tier = disk_tier(options);
    const Bytes bytes(5000, 3);
    tier->write(*tier->take(bytes.size()), bytes.data());
    EXPECT_TRUE(std::filesystem::is_empty(directory));
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory));
  std::filesystem::remove(directory);
}

// ---- io_uring alone
// ------------------------------------------------------------------------------------------------

using DiskTierByUring = DiskTier;
INSTANTIATE_TEST_SUITE_P(Ways, DiskTierByUring, testing::Values(Way::kUring, Way::kUringPretended),
                         [](const auto& tested) { return std::string(test::name_of(tested.param)); });

struct RefusingFile : TamperedFile {
  RefusingFile(Way way, int refuse_at) : TamperedFile(way), refuse_at_(refuse_at) {}
  int refusal() override { return calls_++ == refuse_at_ ? EAGAIN : 0; }
  ssize_t answer(const Call& /*call*/, ssize_t result) override {
    ++answers_;
    return result;
  }
  int refuse_at_;
  std::atomic<int> calls_{0};
  std::atomic<int> answers_{0};
};

TEST_P(DiskTierByUring, WhatARingDoesNotTakeGoesByPlainCalls) {
  std::mt19937_64 random(9);
  const Bytes bytes = random_bytes(random, 40000);  // 5 blocks
  for (int refuse_at = 0; refuse_at < 20; ++refuse_at) {
    auto owned = std::make_unique<RefusingFile>(GetParam(), refuse_at);
    const RefusingFile& file = *owned;
    const auto tier = tier_on(std::move(owned));
    const auto slot = tier->take(bytes.size());
    for (int again = 0; again < 2; ++again) {
      Bytes back(bytes.size());
      tier->write(*slot, bytes.data());
      tier->read(*slot, back.data());
      EXPECT_EQ(back, bytes);
    }
    EXPECT_EQ(file.answers_, 20);
    EXPECT_EQ(file.calls_, 20 - (4 - refuse_at % 5)) << "the next page is the next ring's";
  }
}

struct RinglessFile : TamperedFile {
  RinglessFile(Way way, int rings) : TamperedFile(way), rings_(rings) {}
  std::unique_ptr<Uring> sys_uring(const std::vector<iovec>& blocks) override {
    if (--rings_ < 0) throw ConfigError("no ring for a test");
    return TamperedFile::sys_uring(blocks);
  }
  std::atomic<int> rings_;
};

TEST_P(DiskTierByUring, WithoutFurtherRingsPagesGoByPlainCalls) {
  const auto tier = tier_on(std::make_unique<RinglessFile>(GetParam(), 1));
  std::atomic<int> wrong{0};
  round_trips(*tier, 4, 30, [&](const auto& trip) { wrong += !trip(); });
  EXPECT_EQ(wrong, 0);
}

TEST(DiskTierOptions, WithoutIoUringAutomaticTakesThreadsAndUringSaysWhy) {
  const auto file = [] { return std::make_unique<RinglessFile>(Way::kUringPretended, 0); };
  try {
    disk_tier_on(file(), small_blocks(DiskIo::kUring));
    FAIL() << "not refused";
  } catch (const ConfigError& error) {
    EXPECT_EQ(message_of(error), "no ring for a test");
  }
  const auto tier = disk_tier_on(file(), small_blocks(DiskIo::kAutomatic));
  const Bytes bytes(30000, 7);
  Bytes back(bytes.size());
  const auto slot = tier->take(bytes.size());
  tier->write(*slot, bytes.data());
  tier->read(*slot, back.data());
  EXPECT_EQ(back, bytes);
}

TEST(DiskTierOptions, RefusesWhatCannotWork) {
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

}  // namespace
}  // namespace reef
