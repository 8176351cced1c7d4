#include "userfault/frame_pool.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "free_ranges.h"
#include "userfault/userfault.h"

namespace reef {
namespace {

constexpr std::uint64_t kFrame = kFrameBytes;

// ---- ranges

TEST(FreeRanges, AreWhatAListOfBytesSays) {
  std::mt19937 random(7);
  constexpr std::uint64_t kBytes = 400;
  for (int program = 0; program < 50; ++program) {
    FreeRanges ranges;
    std::vector<bool> is_free(kBytes, true);
    ranges.add(0, kBytes);
    std::vector<FreeRanges::Range> taken;
    const auto note = [&](std::uint64_t start, std::uint64_t bytes, bool free) {
      for (std::uint64_t i = start; i < start + bytes; ++i) {
        ASSERT_NE(is_free[i], free) << i;
        is_free[i] = free;
      }
    };
    for (int step = 0; step < 300; ++step) {
      const std::uint64_t bytes = 1 + random() % 40;
      const std::uint64_t alignment = std::uint64_t{1} << random() % 4;
      switch (random() % 4) {
        case 0:
          if (const auto range = ranges.take_largest(bytes)) {
            note(range->start, range->bytes, false);
            taken.push_back(*range);
          }
          break;
        case 1:
          if (const auto start = ranges.take(bytes, alignment)) {
            EXPECT_EQ(*start % alignment, 0);
            note(*start, bytes, false);
            taken.push_back({*start, bytes});
          } else {  // so there is none
            std::uint64_t run = 0;
            for (std::uint64_t i = 0; i < kBytes; ++i) {
              run = !is_free[i] ? 0 : run > 0 || i % alignment == 0 ? run + 1 : 0;
              ASSERT_LT(run, bytes);
            }
          }
          break;
        case 2:
          if (const auto range = ranges.take_smallest(bytes)) {
            note(range->start, range->bytes, false);
            taken.push_back(*range);
          }
          break;
        default:
          if (!taken.empty()) {
            std::swap(taken[random() % taken.size()], taken.back());
            note(taken.back().start, taken.back().bytes, true);
            ranges.add(taken.back().start, taken.back().bytes);
            taken.pop_back();
          }
      }
      ASSERT_EQ(ranges.bytes(), static_cast<std::uint64_t>(std::count(is_free.begin(), is_free.end(), true)));
    }
  }
}

// ---- frames

std::uint64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t all = 0;
  std::uint64_t resident = 0;
  file >> all >> resident;
  return resident * kFrame;
}

std::size_t mappings() {
  std::ifstream file("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(file, line);) ++count;
  return count;
}

// A range of addresses that is watched, and a thread that answers its faults.
class FramePoolTest : public ::testing::TestWithParam<FaultAccess> {
 protected:
  static constexpr std::uint64_t kPages = 64;
  static constexpr std::uint64_t kPageBytes = 16 * kFrame;
  static constexpr std::uint64_t kArenaBytes = kPages * kPageBytes;

  void SetUp() override {
    const FaultSupport support = fault_support();
    if (support.access < GetParam()) GTEST_SKIP() << support.reason;
    faults_ = std::make_unique<UserFault>(GetParam());
    pool_ = std::make_unique<FramePool>(*faults_, 4 * kArenaBytes);
    arena_ = static_cast<char*>(::mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    ASSERT_NE(arena_, MAP_FAILED);
    faults_->watch(arena_, kArenaBytes);
  }
  void TearDown() override {
    if (faults_ == nullptr) return;
    stop();
    ::munmap(arena_, kArenaBytes);
  }

  char* page(std::uint64_t i) { return arena_ + i * kPageBytes; }
  void fill(std::uint64_t i) { pool_->move_in(pool_->take(kPageBytes), page(i)); }
  void serve() {
    server_ = std::thread([this] {
      while (const auto address = faults_->next())
        bring((*address - reinterpret_cast<std::uint64_t>(arena_)) / kPageBytes);
    });
  }
  void stop() {
    if (!server_.joinable()) return;
    faults_->close();
    server_.join();
  }
  void bring(std::uint64_t i) {
    const std::lock_guard lock(mutex_);
    if (!away_.contains(i)) return faults_->wake(page(i), kPageBytes);
    pool_->move_in(away_.at(i), page(i));
    away_.erase(i);
  }
  void evict(std::uint64_t i) {
    const std::lock_guard lock(mutex_);
    if (away_.contains(i)) return;
    away_.emplace(i, pool_->move_out(page(i), kPageBytes).value());
  }

  std::unique_ptr<UserFault> faults_;
  std::unique_ptr<FramePool> pool_;
  char* arena_ = nullptr;
  std::mutex mutex_;
  std::map<std::uint64_t, FramePool::Frames> away_;
  std::thread server_;
};

TEST_P(FramePoolTest, BytesLeaveAndComeWithTheirFrames) {
  fill(0);
  std::memset(page(0), 7, kPageBytes);
  const auto frames = pool_->move_out(page(0), kPageBytes);
  ASSERT_TRUE(frames);
  EXPECT_EQ(static_cast<char*>(frames->data)[kPageBytes - 1], 7);
  pool_->move_in(*frames, page(1));
  EXPECT_EQ(std::count(page(1), page(1) + kPageBytes, 7), static_cast<std::ptrdiff_t>(kPageBytes));
}

// Frames in pieces of any size become what is wanted, and none is made while enough are kept.
TEST_P(FramePoolTest, FramesCirculate) {
  std::vector<FramePool::Frames> taken;
  for (int i = 0; i < 32; ++i) taken.push_back(pool_->take((i % 3 + 1) * kFrame));
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < taken.size(); i += 2) {
    bytes += taken[i].bytes;
    std::memset(taken[i].data, 1, taken[i].bytes);
    pool_->keep(taken[i]);
  }
  EXPECT_EQ(pool_->kept_bytes(), bytes);
  const FramePool::Frames whole = pool_->take(bytes);
  EXPECT_EQ(pool_->kept_bytes(), 0);
  EXPECT_EQ(std::count(static_cast<char*>(whole.data), static_cast<char*>(whole.data) + bytes, 1),
            static_cast<std::ptrdiff_t>(bytes));
  pool_->keep(whole);
  fill(3);
  EXPECT_EQ(pool_->kept_bytes(), bytes - kPageBytes);
}

TEST_P(FramePoolTest, WhatIsTrimmedGoesBackToTheSystem) {
  const std::uint64_t before = resident_bytes();
  const FramePool::Frames frames = pool_->take(kArenaBytes);
  EXPECT_GE(resident_bytes(), before + kArenaBytes);
  pool_->keep(frames);
  pool_->trim(3 * kFrame);
  EXPECT_EQ(pool_->kept_bytes(), 3 * kFrame);
  EXPECT_LT(resident_bytes(), before + kArenaBytes / 2);
}

TEST_P(FramePoolTest, MappingsDoNotGrowWithPages) {
  for (std::uint64_t i = 0; i < kPages; ++i) fill(i);
  const std::size_t before = mappings();
  for (std::uint64_t i = 0; i < kPages; i += 2) evict(i);
  EXPECT_LE(mappings(), before + 1);  // of the test's own heap
  for (std::uint64_t i = 0; i < kPages; i += 4) bring(i);
  EXPECT_LE(mappings(), before + 1);
}

// Two threads add by raw pointers while a third takes pages away at random: no write is lost.
TEST_P(FramePoolTest, WhoeverTouchesItWaitsUntilItIsThere) {
  for (std::uint64_t i = 0; i < kPages; ++i) {
    fill(i);
    std::memset(page(i), 0, kPageBytes);
  }
  serve();
  std::atomic<bool> over = false;
  std::thread evictor([&] {
    std::mt19937 random(11);
    while (!over) evict(random() % kPages);
  });
  constexpr int kRounds = 300;
  const auto add = [&](int lane) {
    for (int round = 0; round < kRounds; ++round) {
      for (std::uint64_t at = lane * sizeof(std::uint32_t); at < kArenaBytes; at += 1024)
        ++*reinterpret_cast<std::uint32_t*>(arena_ + at);
    }
  };
  std::thread first(add, 0);
  std::thread second(add, 1);
  first.join();
  second.join();
  over = true;
  evictor.join();
  for (std::uint64_t at = 0; at < kArenaBytes; at += 1024) {
    ASSERT_EQ(*reinterpret_cast<std::uint32_t*>(arena_ + at), kRounds);
    ASSERT_EQ(*reinterpret_cast<std::uint32_t*>(arena_ + at + 4), kRounds);
  }
}

// With full access the kernel waits, too; without, a system call fails and has done nothing.
TEST_P(FramePoolTest, ASystemCallWaitsOrFails) {
  fill(0);
  std::memset(page(0), 5, kPageBytes);
  evict(0);
  serve();
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const ssize_t written = ::write(ends[1], page(0), 100);
  if (GetParam() == FaultAccess::kFull) {
    EXPECT_EQ(written, 100);
  } else {
    EXPECT_EQ(written, -1);
    EXPECT_EQ(errno, EFAULT);
  }
  EXPECT_EQ(page(0)[99], 5);
  ::close(ends[0]);
  ::close(ends[1]);
}

// The parent moves what it shares with a child; the child serves itself.
TEST_P(FramePoolTest, AForkSharesNothingThatMoves) {
  for (std::uint64_t i = 0; i < 4; ++i) {
    fill(i);
    std::memset(page(i), 1 + static_cast<int>(i), kPageBytes);
  }
  evict(3);
  pool_->keep(pool_->take(kPageBytes));
  const pid_t child = ::fork();
  if (child == 0) {
    faults_->open_anew();
    faults_->watch(arena_, kArenaBytes);
    pool_->watch_again();
    serve();
    evict(1);
    page(0)[0] = 9;
    const bool right = page(0)[0] == 9 && page(1)[kFrame] == 2 && page(3)[kFrame] == 4;
    ::_exit(right ? 0 : 1);
  }
  for (std::uint64_t i = 0; i < 3; ++i) {
    evict(i);
    bring(i);
    EXPECT_EQ(page(i)[0], 1 + static_cast<char>(i));
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

INSTANTIATE_TEST_SUITE_P(Access, FramePoolTest, ::testing::Values(FaultAccess::kUser, FaultAccess::kFull),
                         [](const auto& row) { return row.param == FaultAccess::kFull ? "Full" : "User"; });

}  // namespace
}  // namespace reef
