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
#include "page/page_sizes.h"
#include "userfault/userfault.h"

namespace reef {
namespace {

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
  return resident * kFrameBytes;
}

std::size_t mappings() {
  std::ifstream file("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(file, line);) ++count;
  return count;
}

struct Row {
  FaultAccess access;
  std::uint64_t frame_bytes;
};

// Pages, of which only addresses are given, and a thread that answers their faults.
class FramePoolTest : public ::testing::TestWithParam<Row> {
 protected:
  static constexpr std::uint64_t kPages = 64;
  const std::uint64_t kFrame = GetParam().frame_bytes;
  const std::uint64_t kPageBytes = kFrame == kFrameBytes ? 16 * kFrame : kFrame;
  const std::uint64_t kArenaBytes = kPages * kPageBytes;

  void SetUp() override {
    const FaultSupport support = fault_support();
    if (support.access < GetParam().access) GTEST_SKIP() << support.reason;
    faults_ = std::make_unique<UserFault>(GetParam().access);
    pool_ = std::make_unique<FramePool>(*faults_, 4 * kArenaBytes, kFrame);
    arena_ = static_cast<char*>(pool_->take_addresses(kArenaBytes));
  }
  void TearDown() override {
    if (faults_ != nullptr) stop();
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
  if (GetParam().access == FaultAccess::kFull) {
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
    pool_->watch_again();
    serve();
    evict(1);
    page(0)[0] = 9;
    const bool right = page(0)[0] == 9 && page(1)[kPageBytes - 1] == 2 && page(3)[kPageBytes - 1] == 4;
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

// Bytes of large frames that this process has, as the kernel says.
std::uint64_t large_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("AnonHugePages:")) return std::stoull(line.substr(14)) * 1024;
  }
  return 0;
}

// A forked process that shares all memory until it is told to end.
class SharingChild {
 public:
  SharingChild() {
    EXPECT_EQ(::pipe(told_), 0);
    process_ = ::fork();
    if (process_ != 0) return;
    char wait = 0;
    ::_exit(::read(told_[0], &wait, 1) == 1 ? 0 : 1);
  }
  void end() {
    EXPECT_EQ(::write(told_[1], "x", 1), 1);
    EXPECT_EQ(::waitpid(process_, nullptr, 0), process_);
    ::close(told_[0]);
    ::close(told_[1]);
  }

 private:
  int told_[2] = {-1, -1};
  pid_t process_ = -1;
};

// They leave, circulate and come as a whole, also after a fork.
TEST_P(FramePoolTest, LargeFramesStayLarge) {
  if (kFrame == kFrameBytes) GTEST_SKIP() << "small frames";
  const std::uint64_t before = large_bytes();
  for (std::uint64_t i = 0; i < 8; ++i) fill(i);
  if (large_bytes() < before + 8 * kFrame) GTEST_SKIP() << "the system has no large frames now";
  for (int round = 0; round < 100; ++round) {
    evict(round % 8);
    bring(round % 8);
  }
  EXPECT_EQ(large_bytes(), before + 8 * kFrame);
  SharingChild child;
  const auto move_all = [&] {
    for (std::uint64_t i = 0; i < 8; ++i) {
      evict(i);
      bring(i);
    }
  };
  move_all();
  child.end();
  move_all();
}

// The kernel refuses what is left of a large frame that was shared.
TEST_P(FramePoolTest, WhatIsLeftOfASharedLargeFrameMoves) {
  fill(0);
  std::memset(page(0), 5, kPageBytes);
  SharingChild child;
  std::memset(page(0), 6, kPageBytes / 3);
  child.end();
  std::memset(page(0) + kPageBytes / 3, 6, kPageBytes - kPageBytes / 3);
  evict(0);
  bring(0);
  EXPECT_EQ(std::count(page(0), page(0) + kPageBytes, 6), static_cast<std::ptrdiff_t>(kPageBytes));
}

constexpr Row kRows[] = {{FaultAccess::kUser, kFrameBytes},
                         {FaultAccess::kFull, kFrameBytes},
                         {FaultAccess::kFull, kLargeFrameBytes}};
INSTANTIATE_TEST_SUITE_P(Rows, FramePoolTest, ::testing::ValuesIn(kRows), [](const auto& row) {
  return std::string(row.param.access == FaultAccess::kFull ? "Full" : "User") +
         (row.param.frame_bytes == kFrameBytes ? "" : "Large");
});

// ---- which pages are of large frames

TEST(PageSizes, AreASmallPartOfTheBudget) {
  for (int bits = 12; bits < 44; ++bits) {
    for (const std::uint64_t budget_bytes : {std::uint64_t{1} << bits, (std::uint64_t{1} << bits) + 12345}) {
      const PageSizes sizes = PageSizes::of_budget(budget_bytes, /*has_large_frames=*/true);
      EXPECT_FALSE(PageSizes::of_budget(budget_bytes, /*has_large_frames=*/false).large_frames);
      for (int block_bits = 12; block_bits < 33; ++block_bits) {
        for (const std::uint64_t block_bytes :
             {std::uint64_t{1} << block_bits, std::uint64_t{9} << (block_bits - 3),
              (std::uint64_t{1} << block_bits) + 4096}) {
          const std::uint64_t frame_bytes = sizes.frame_bytes(block_bytes);
          const std::uint64_t page_bytes = sizes.page_bytes(block_bytes, frame_bytes);
          EXPECT_EQ(page_bytes % frame_bytes, 0);
          EXPECT_LE(round_up(block_bytes, page_bytes) / page_bytes,
                    std::max(PageSizes::kMostPagesInBlock + 1, block_bytes / page_bytes + 1));
          const std::uint64_t least_pages =
              frame_bytes == kFrameBytes ? PageSizes::kPagesInBudget : PageSizes::kLargePagesInBudget;
          const bool is_part = page_bytes <= std::max(budget_bytes / least_pages, kFrameBytes);
          EXPECT_TRUE(is_part ||
                      page_bytes <= round_up(block_bytes / PageSizes::kMostPagesInBlock, frame_bytes))
              << budget_bytes << ' ' << block_bytes;
          if (frame_bytes == kFrameBytes) continue;
          EXPECT_GE(budget_bytes, PageSizes::kLargePagesInBudget * kLargeFrameBytes);
          EXPECT_LE(round_up(block_bytes, frame_bytes) - block_bytes, block_bytes / 8);
        }
      }
    }
  }
}

}  // namespace
}  // namespace reef
