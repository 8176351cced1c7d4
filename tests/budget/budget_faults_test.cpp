// Every transfer and every system call of the swap file fails once: each time training ends in a typed error,
// or goes on as if nothing had been, and each parameter is as some whole step left it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "budget/deep_net.h"
#include "reef/budget.h"
#include "reef/error.h"
#include "reef/ledger.h"
#include "support/forwarding_tier.h"
#include "support/tampered_file.h"
#include "tier/disk.h"

namespace reef {
namespace {

using namespace test;

constexpr int kSteps = 4;  // the first is recorded, the others are followed

struct BudgetFaults : testing::Test {
  BudgetFaults() {
    const Ledger first;  // settles MKL's vector functions, so that the plain run is what every run is
    torch::manual_seed(0);
    net = deep_net();
    stages.push_back(copies(*net));
    for (int step = 0; step < kSteps; ++step) {
      sgd_step(net);
      stages.push_back(copies(*net));
    }
  }

  /// What was thrown; "": nothing.
  std::string train_on(const std::shared_ptr<Tier>& tier, bool prefetch,
                       const std::function<void(int step)>& before_step = {}) {
    net->zero_grad();
    put(stages.front(), *net);
    Budget budget(kMany, {net.get()}, {.device = c10::kCPU, .tiers = {tier}, .prefetch = prefetch});
    try {
      budget.set_bytes(budget.use().live_bytes);
      for (int step = 0; step < kSteps; ++step) {
        if (before_step) before_step(step);
        sgd_step(net);
      }
      fetches = budget.use().fetches;
      budget.end();
    } catch (const std::exception& error) {
      return message_of(error);
    }
    return "";
  }

  void expect_whole(const std::string& when) {
    for (std::size_t i = 0; i < stages.front().size(); ++i) {
      const at::Tensor parameter = net->parameters()[i];
      EXPECT_TRUE(std::any_of(stages.begin(), stages.end(),
                              [&](const auto& stage) { return torch::equal(parameter, stage[i]); }))
          << "parameter " << i << " " << when;
    }
  }

  void expect_trained() {
    for (std::size_t i = 0; i < stages.front().size(); ++i)
      EXPECT_TRUE(torch::equal(net->parameters()[i], stages.back()[i])) << "parameter " << i;
  }

  torch::nn::Sequential net{nullptr};
  std::vector<std::vector<at::Tensor>> stages;  ///< the parameters after each step of a plain run
  std::uint64_t fetches = 0;
};

// Calls that fail when the n-th comes.
struct Countdown {
  bool now() { return calls++ == fail_at; }
  int fail_at = -1;
  std::atomic<int> calls{0};
};

struct FaultyTier final : ForwardingTier {
  FaultyTier(int n, std::function<void(int)> how) : fail(std::move(how)) { countdown.fail_at = n; }
  void before() override {
    if (countdown.now()) fail(countdown.fail_at);
  }
  std::function<void(int)> fail;
  Countdown countdown;
};

void fail_with_a_file_error(int n) {
  throw FileError("transfer " + std::to_string(n) + " failed", "here", 5);
}

TEST_F(BudgetFaults, EveryFailingTransferOnDemand) {
  const auto counting = std::make_shared<FaultyTier>(-1, fail_with_a_file_error);
  ASSERT_EQ(train_on(counting, false), "");
  EXPECT_EQ(fetches, 0);
  ASSERT_GT(counting->countdown.calls, 20);
  for (int n = 0; n < counting->countdown.calls; ++n) {
    const std::string error = train_on(std::make_shared<FaultyTier>(n, fail_with_a_file_error), false);
    ASSERT_NE(error.find("transfer " + std::to_string(n) + " failed"), std::string::npos) << error;
    expect_whole("after transfer " + std::to_string(n) + " failed");
    ASSERT_FALSE(HasFailure());
  }
}

// Beside the operators the number of transfers varies with their speed.
TEST_F(BudgetFaults, EveryFailingTransferBesideTheOperators) {
  const auto counting = std::make_shared<FaultyTier>(-1, fail_with_a_file_error);
  ASSERT_EQ(train_on(counting, true), "");
  EXPECT_GT(fetches, 0);
  for (int n = 0; n < counting->countdown.calls; ++n) {
    const auto faulty = std::make_shared<FaultyTier>(n, fail_with_a_file_error);
    const std::string error = train_on(faulty, true);
    if (error.empty()) {
      EXPECT_LE(faulty->countdown.calls, n) << "transfer " << n << " failed and nobody was told";
      expect_trained();
    }
    expect_whole("after transfer " + std::to_string(n) + " failed");
    ASSERT_FALSE(HasFailure()) << error;
  }
}

TEST_F(BudgetFaults, WhateverATierThrowsArrives) {
  for (const bool prefetch : {false, true}) {
    for (int n = 5; n < 60; n += 6) {
      const auto throws = std::make_shared<FaultyTier>(n, [](int) { throw std::bad_alloc(); });
      const std::string error = train_on(throws, prefetch);
      EXPECT_EQ(error.empty(), throws->countdown.calls <= n) << "transfer " << n;
      expect_whole("after a bad_alloc in transfer " + std::to_string(n));
    }
  }
}

enum class Fault : std::uint8_t { kNoSpace, kReadError, kFlippedBit };

// A swap file whose n-th call of one kind fails.
struct FaultyFile final : TamperedFile {
  FaultyFile(Way way, Fault what, std::shared_ptr<Countdown> when)
      : TamperedFile(way), fault(what), countdown(std::move(when)) {}
  ssize_t answer(const Call& call, ssize_t result) override {
    if (call.writes) return fault == Fault::kNoSpace && countdown->now() ? -ENOSPC : result;
    if (fault == Fault::kNoSpace || !countdown->now()) return result;
    if (fault == Fault::kReadError) return -EIO;
    if (result > 0) static_cast<char*>(call.data)[result / 2000] ^= 1;
    return result;
  }
  int sys_fallocate(off_t offset, off_t bytes) override {
    return fault == Fault::kNoSpace && countdown->now() ? ENOSPC : SwapFile::sys_fallocate(offset, bytes);
  }
  Fault fault;
  std::shared_ptr<Countdown> countdown;
};

struct BudgetDiskFaults : BudgetFaults, testing::WithParamInterface<Way> {
  void SetUp() override {
    if (const std::string why = obstacle(GetParam()); !why.empty()) GTEST_SKIP() << why;
  }
};
INSTANTIATE_TEST_SUITE_P(Ways, BudgetDiskFaults, testing::Values(Way::kThreads, Way::kUring),
                         [](const auto& tested) { return std::string(name_of(tested.param)); });

TEST_P(BudgetDiskFaults, EveryFailingSystemCallOfTheSwapFile) {
  const auto train = [&](Fault fault, const std::shared_ptr<Countdown>& countdown, bool prefetch) {
    const DiskTierOptions options{.directory = "",
                                  .capacity_bytes = kMany,
                                  .block_bytes = 16384,
                                  .threads = 2,
                                  .io = io_of(GetParam())};
    return train_on(disk_tier_on(std::make_unique<FaultyFile>(GetParam(), fault, countdown), options),
                    prefetch);
  };
  // The tier's own test lets every one fail; and an error costs more on a thread with a deep stack.
  const int stride = GetParam() == Way::kThreads ? 1 : 5;
  for (const Fault fault : {Fault::kNoSpace, Fault::kReadError, Fault::kFlippedBit}) {
    for (const bool prefetch : {false, true}) {
      const auto counting = std::make_shared<Countdown>();
      ASSERT_EQ(train(fault, counting, prefetch), "");
      expect_trained();
      ASSERT_GT(counting->calls, 20);
      for (int n = 0; n < counting->calls; n += std::max(stride, prefetch ? 3 : 1)) {
        const auto countdown = std::make_shared<Countdown>();
        countdown->fail_at = n;
        const std::string error = train(fault, countdown, prefetch);
        if (countdown->calls > n) {
          EXPECT_NE(error, "") << "call " << n << " failed and nobody was told";
        } else {
          expect_trained();
        }
        expect_whole("after call " + std::to_string(n) + " failed");
        ASSERT_FALSE(HasFailure()) << error;
      }
    }
  }
}

// The file has no name: nobody can take it away.
TEST_F(BudgetFaults, AVanishedDirectoryChangesNothing) {
  std::string name = (std::filesystem::temp_directory_path() / "reef.XXXXXX").string();
  ASSERT_NE(::mkdtemp(name.data()), nullptr);
  const auto tier = disk_tier({.directory = name, .capacity_bytes = kMany});
  const std::string error = train_on(tier, true, [&](int step) {
    if (step == 2) std::filesystem::remove_all(name);
  });
  EXPECT_EQ(error, "");
  EXPECT_FALSE(std::filesystem::exists(name));
  expect_trained();
  EXPECT_THROW(disk_tier({.directory = name, .capacity_bytes = kMany}), FileError);
}

}  // namespace
}  // namespace reef
