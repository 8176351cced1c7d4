#include "reef/tier_speed.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>

#include "reef/error.h"
#include "support/forwarding_tier.h"

namespace reef {
namespace {

/// Until the end of a test.
struct Threads {
  explicit Threads(unsigned count) : before(at::get_num_threads()) {
    at::set_num_threads(static_cast<int>(count));
  }
  ~Threads() { at::set_num_threads(before); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
  int before;
};

TEST(TierSpeed, CopiesOnTheComputingCoresAreWork) {
  const Threads all(std::thread::hardware_concurrency());
  const TierSpeed speed = tier_speed(host_tier(1 << 30), c10::kCPU);
  EXPECT_GT(speed.bytes_per_second, 1e6);
  EXPECT_GT(speed.work_share, 0);
  EXPECT_LE(speed.work_share, 1);
}

TEST(TierSpeed, ASpareCoreCopiesForNothing) {
  if (std::thread::hardware_concurrency() == 1) GTEST_SKIP() << "there is one core";
  const Threads one(1);
  EXPECT_EQ(tier_speed(host_tier(1 << 30), c10::kCPU).work_share, 0);
}

TEST(TierSpeed, IsThatOfTheSlowerWayAndWaitingIsNoWork) {
  struct SlowReads final : test::ForwardingTier {
    void read(Slot slot, void* data) override {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      test::ForwardingTier::read(slot, data);
    }
  };
  const Threads all(std::thread::hardware_concurrency());
  const auto tier = std::make_shared<SlowReads>();
  const TierSpeed speed = tier_speed(tier, c10::kCPU, 4096);
  EXPECT_LE(speed.bytes_per_second, 4096 / 0.05);
  EXPECT_LT(speed.work_share, 1);
  EXPECT_EQ(tier->use().used_bytes, 0U);
}

TEST(TierSpeed, WhatCannotBeMeasuredIsRefused) {
  EXPECT_THROW(tier_speed(host_tier(8192), c10::kCPU), ConfigError);  // no room
  EXPECT_THROW(tier_speed(host_tier(8192), c10::kCPU, 0), ConfigError);
  EXPECT_THROW(tier_speed(host_tier(8192), c10::kMeta, 4096), ConfigError);
}

}  // namespace
}  // namespace reef
