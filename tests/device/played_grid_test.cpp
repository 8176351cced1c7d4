// Tests the played device itself: collectives give every thread the right value in any order of threads, and
// undefined behaviour is reported.
#include "device/played_grid.h"

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <gtest/gtest.h>

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <functional>
#include <string>
#include <vector>

namespace reef::played {
namespace {

namespace groups = cooperative_groups;

std::string told_of(unsigned threads, const std::function<void()>& kernel) {
  try {
    run_grid(1, threads, kernel);
  } catch (const UndefinedBehavior& error) {
    return error.what();
  }
  return "";
}

TEST(PlayedGrid, RunsEveryThreadOnceInSomeOrder) {
  std::vector<std::vector<unsigned>> orders;
  for (int round = 0; round < 3; ++round) {
    std::vector<unsigned> ran;
    run_grid(3, 40, [&] { ran.push_back(blockIdx.x * blockDim.x + threadIdx.x); });
    orders.push_back(ran);
    std::sort(ran.begin(), ran.end());
    ASSERT_EQ(ran.size(), 120U);
    for (unsigned i = 0; i < 120; ++i) EXPECT_EQ(ran[i], i);
    EXPECT_EQ(gridDim.x, 3U);
  }
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_NE(orders[1], orders[2]);
}

TEST(PlayedGrid, TheSameSeedGivesTheSameOrder) {
  const auto order = [](std::uint64_t with) {
    seed(with);
    std::vector<unsigned> ran;
    run_grid(2, 64, [&] {
      ran.push_back(threadIdx.x);
      __syncthreads();
      ran.push_back(threadIdx.x);
    });
    return ran;
  };
  EXPECT_EQ(order(5), order(5));
  EXPECT_NE(order(5), order(6));
}

TEST(PlayedGrid, ABarrierHoldsAllThreadsOfABlock) {
  for (int round = 0; round < 20; ++round) {
    std::vector<unsigned> behind(96);
    unsigned before = 0;
    run_grid(1, 96, [&] {
      for (unsigned lap = 1; lap <= 4; ++lap) {
        ++before;
        __syncthreads();
        behind[threadIdx.x] += before == 96 * lap ? 1 : 0;
        __syncthreads();
      }
    });
    for (const unsigned each : behind) EXPECT_EQ(each, 4U);
  }
}

template <unsigned kSize>
void expect_exchanges() {
  run_grid(2, 64, [] {
    const auto tile = groups::tiled_partition<kSize>(groups::this_thread_block());
    const unsigned first = threadIdx.x / kSize * kSize;
    unsigned sum = 0, even = 0;
    for (unsigned i = 0; i < kSize; ++i) {
      sum += first + i;
      even |= (first + i) % 2 == 0 ? 1U << i : 0U;
    }
    EXPECT_EQ(tile.thread_rank(), threadIdx.x - first);
    EXPECT_EQ(groups::reduce(tile, threadIdx.x, groups::plus<unsigned>()), sum);
    EXPECT_EQ(groups::reduce(tile, threadIdx.x, groups::greater<unsigned>()), first + kSize - 1);
    EXPECT_EQ(tile.ballot(threadIdx.x % 2 == 0), even);
    EXPECT_EQ(tile.any(threadIdx.x == 40), first <= 40 && 40 < first + kSize);
  });
}
TEST(PlayedGrid, TilesExchangeAmongThemselves) {
  expect_exchanges<32>();
  expect_exchanges<16>();
  expect_exchanges<4>();
  expect_exchanges<1>();
}

// A scan gives every thread the sum of the threads before it; a reduction gives its sum to thread 0 only.
TEST(PlayedGrid, BlocksScanAndAddUp) {
  using Scan = cub::BlockScan<unsigned, 128>;
  using Sum = cub::BlockReduce<double, 128>;
  static Scan::TempStorage of_scan;
  static Sum::TempStorage of_sum;
  run_grid(2, 128, [] {
    unsigned before = 7;
    Scan(of_scan).ExclusiveSum(threadIdx.x, before);
    EXPECT_EQ(before, threadIdx.x * (threadIdx.x - 1) / 2);
    const double sum = Sum(of_sum).Sum(threadIdx.x);
    if (threadIdx.x == 0) {
      EXPECT_EQ(sum, 127.0 * 128 / 2);
    } else {
      EXPECT_NE(sum, 127.0 * 128 / 2);
    }
  });
}

TEST(PlayedGrid, TellsWhatCudaLeavesUndefined) {
  const auto all = [] { return groups::tiled_partition<32>(groups::this_thread_block()); };
  EXPECT_EQ(told_of(32, [&] { all().any(true); }), "");
  const std::string different = "threads of one group are in different exchanges";
  const std::string hangs = "wait for others that never come";
  EXPECT_NE(told_of(32,
                    [&] {
                      if (threadIdx.x < 16) {
                        all().any(true);
                      } else {
                        all().ballot(true);
                      }
                    })
                .find(different),
            std::string::npos);
  EXPECT_NE(told_of(32,
                    [&] {
                      if (threadIdx.x != 3) all().any(true);
                    })
                .find("31 threads " + hangs),
            std::string::npos);
  EXPECT_NE(told_of(64,
                    [&] {
                      if (threadIdx.x < 32) __syncthreads();
                    })
                .find("32 threads " + hangs),
            std::string::npos);
  static cub::BlockScan<unsigned, 32>::TempStorage scratch;
  const auto scan = [&] {
    unsigned before = 0;
    cub::BlockScan<unsigned, 32>(scratch).ExclusiveSum(1, before);
  };
  EXPECT_NE(told_of(32,
                    [&] {
                      scan();
                      scan();
                    })
                .find("scratch memory is used again without a barrier"),
            std::string::npos);
  EXPECT_EQ(told_of(32,
                    [&] {
                      scan();
                      __syncthreads();
                      scan();
                    }),
            "");
  EXPECT_EQ(told_of(64,
                    [&] {
                      if (threadIdx.x < 32) all().any(true);  // A whole warp may return early.
                    }),
            "");
}

}  // namespace
}  // namespace reef::played
