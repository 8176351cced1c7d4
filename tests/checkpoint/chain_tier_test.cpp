// Chains whose outputs and tapes leave for a tier between forward and backward.
#include <atomic>
#include <chrono>
#include <thread>

#include "chain_nets.h"
#include "reef/budget.h"
#include "reef/bytes.h"
#include "reef/chain.h"
#include "reef/error.h"
#include "support/forwarding_tier.h"

namespace reef {
namespace {

using namespace chain_tests;

struct SlowTier final : test::ForwardingTier {
  void before() override { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }
};

/// Fails at the transfer that is counted down to.
struct FailingTier final : test::ForwardingTier {
  void before() override {
    if (--left == 0) throw FileError("the tier has failed", "nowhere");
  }
  std::atomic<int> left = 0;
};

/// A profile beside a tier whose copies take about as long as the stages.
struct Profiled {
  explicit Profiled(Net& net) : plain(plain_step(net)), chain(net.layers) {
    profile = profile_chain(chain, net.input, {.repeats = 1});
    double bytes = 0, seconds = 0;
    for (const StageProfile& stage : profile.stages) {
      bytes += static_cast<double>(stage.tape_bytes + stage.output_bytes);
      seconds += stage.forward_seconds;
    }
    profile.tier_speed.bytes_per_second = bytes / seconds;
    profile.tier_capacity_bytes = 1 << 30;
    least = minimum_bytes(profile);
    most = natural_peak_bytes(profile);
  }
  Schedule schedule(std::uint64_t share, ChainSolver solver) const {
    return plan_chain(profile, least + (most - least) * share / 10, {.solver = solver});
  }

  Left plain;
  Chain chain;
  ChainProfile profile;
  std::uint64_t least = 0, most = 0;
};

TEST(ChainTier, EveryScheduleIsBitForBitThePlainRunAndNeedsWhatWasPredicted) {
  for (Net& net : nets()) {
    const Profiled of(net);
    const std::shared_ptr<Tier> tiers[] = {
        host_tier(1 << 30), std::make_shared<SlowTier>(),
        disk_tier({.directory = testing::TempDir(), .capacity_bytes = 1 << 26})};
    // The loss's, and storages that are too small to be moved.
    const double slack = 6.0 * static_cast<double>(of.profile.stages.back().output_bytes) + 256 +
                         2048.0 * static_cast<double>(of.profile.stages.size());
    std::uint64_t moved = 0;
    for (const ChainSolver solver : {ChainSolver::kOffload, ChainSolver::kCombined}) {
      for (std::uint64_t share = 0; share <= 10; ++share) {
        Schedule schedule;
        try {
          schedule = of.schedule(share, solver);
        } catch (const BudgetError&) {
          EXPECT_EQ(solver, ChainSolver::kOffload);
          continue;
        }
        const ScheduleCost cost = simulate(of.profile, schedule);
        for (const auto& tier : tiers) {
          const std::string what = std::string(net.name) + ", " + tier->name() + ", " + schedule.text();
          const TierUse before = tier->use();
          const Left ours = step(
              net, [&](const Tensor& x) { return run(of.chain, schedule, x, {.check_values = true}, tier); });
          expect_equal(ours, of.plain, what);
          EXPECT_NEAR(static_cast<double>(ours.peak_bytes), static_cast<double>(cost.peak_bytes),
                      0.02 * static_cast<double>(cost.peak_bytes) + slack)
              << what;
          const TierUse after = tier->use();
          EXPECT_EQ(after.used_bytes, 0U) << what;
          EXPECT_LE(after.written_bytes - before.written_bytes, cost.offloaded_bytes) << what;
          moved += after.written_bytes - before.written_bytes;
        }
      }
    }
    EXPECT_GT(moved, of.most) << net.name;
  }
}

TEST(ChainTier, RetainedGraphsAndChainsInsideCheckpoints) {
  auto all = nets();
  Net& net = all[0];
  const Profiled of(net);
  const Schedule schedule = of.schedule(4, ChainSolver::kOffload);
  const auto tier = host_tier(1 << 30);
  const auto loss = [&](bool ours) {
    torch::manual_seed(9);
    const Tensor before = net.input.tanh();
    return (ours ? run(of.chain, schedule, before, {}, tier) : of.chain(before)).pow(2).mean();
  };
  const auto gradient = [&](const Tensor& of_loss, bool keep) {
    return torch::autograd::grad({of_loss}, {net.input}, {}, keep)[0];
  };
  const Tensor plain = loss(false), ours = loss(true);
  const Tensor wanted = gradient(plain, false);
  EXPECT_TRUE(gradient(ours, true).equal(wanted));
  EXPECT_TRUE(gradient(ours, true).equal(wanted));
  EXPECT_TRUE(gradient(ours, false).equal(wanted));
  expect_equal(step(net,
                    [&](const Tensor& x) {
                      return checkpoint(
                          [&](const Tensor& in) { return run(of.chain, schedule, in, {}, tier); }, x);
                    }),
               of.plain, "inside a checkpoint");
}

TEST(ChainTier, ABudgetMovesByItself) {
  for (Net& net : nets()) {
    const Profiled of(net);
    const Schedule schedule = of.schedule(5, ChainSolver::kCombined);
    const auto tier = host_tier(1 << 30);
    const Budget budget(4_MiB, {net.layers.get()});
    for (int repeat = 0; repeat < 3; ++repeat) {
      expect_equal(step(net, [&](const Tensor& x) { return run(of.chain, schedule, x, {}, tier); }), of.plain,
                   net.name);
    }
    EXPECT_EQ(tier->use().written_bytes, 0U);
  }
}

// A program may look at what it has kept, whatever has left.
TEST(ChainTier, WhatTheProgramHoldsStays) {
  auto all = nets();
  Net& net = all[2];
  std::vector<Tensor> held;
  Chain chain;
  for (std::size_t i = 0; i < net.layers->size(); ++i) {
    chain.add("stage", [&held, i, plain = Chain(net.layers)](const Tensor& x) {
      Tensor y = plain.run(i, x);
      held.push_back(y.detach());
      return y;
    });
  }
  ChainProfile profile = profile_chain(chain, net.input);
  profile.tier_speed.bytes_per_second = 1e9;
  profile.tier_capacity_bytes = 1 << 30;
  const Schedule schedule =
      plan_chain(profile, (natural_peak_bytes(profile) * 3) / 4, {.solver = ChainSolver::kOffload});
  EXPECT_GT(simulate(profile, schedule).offloaded_bytes, 0U);
  held.clear();
  const Tensor y = run(chain, schedule, net.input, {}, host_tier(1 << 30));
  const Tensors seen = held;
  Tensor x = net.input;
  for (std::size_t i = 0; i < chain.size(); ++i) {
    x = chain.run(i, x);
    EXPECT_TRUE(seen.at(i).equal(x)) << i;
  }
  y.sum().backward();
}

TEST(ChainTier, AfterATransferThatFailsEverythingIsWhole) {
  auto all = nets();
  Net& net = all[0];
  const Profiled of(net);
  const Schedule schedule = of.schedule(3, ChainSolver::kOffload);
  const auto tier = std::make_shared<FailingTier>();
  const auto attempt = [&] {
    return step(net, [&](const Tensor& x) { return run(of.chain, schedule, x, {}, tier); });
  };
  const auto transfers = [&] { return -tier->left; };
  expect_equal(attempt(), of.plain, "none fails");
  const int all_transfers = transfers();
  ASSERT_GT(all_transfers, 4);
  for (int fails = 1; fails <= all_transfers; ++fails) {
    tier->left = fails;
    EXPECT_THROW(attempt(), FileError) << fails;
    EXPECT_EQ(tier->use().used_bytes, 0U) << fails;
    tier->left = 0;
    expect_equal(attempt(), of.plain, "after transfer " + std::to_string(fails));
  }
}

TEST(ChainTier, WhatHasNoRoomOrNoTierIsRefused) {
  auto all = nets();
  Net& net = all[0];
  const Profiled of(net);
  const Schedule schedule = of.schedule(3, ChainSolver::kOffload);
  EXPECT_THROW(run(of.chain, schedule, net.input), ConfigError);
  const auto small = host_tier(8192);
  EXPECT_THROW(run(of.chain, schedule, net.input, {}, small), BudgetError);
  EXPECT_EQ(small->use().used_bytes, 0U);
}

TEST(CheckpointSequential, ATierMayTakeWhatDoesNotFit) {
  for (Net& net : nets()) {
    const Profiled of(net);
    const auto tier = host_tier(1 << 30);
    const PlannedChainOptions options{
        .solver = {.solver = ChainSolver::kOffload}, .tier = tier, .tier_speed = {.bytes_per_second = 1e12}};
    std::uint64_t least = 0;
    try {
      plan_chain(of.profile, 0, {.solver = ChainSolver::kOffload});
    } catch (const BudgetError& error) {
      least = error.smallest_budget_bytes();
    }
    const auto budget_bytes = static_cast<std::int64_t>((least + of.most) / 2);
    const ChainPlan& plan = plan_of(net.layers, net.input, budget_bytes, options);
    EXPECT_EQ(plan.profile.tier_speed.bytes_per_second, 1e12);
    EXPECT_NE(plan.text().find("by way of the tier"), std::string::npos) << plan.text();
    const Left ours = step(
        net, [&](const Tensor& x) { return checkpoint_sequential(net.layers, x, budget_bytes, options); });
    expect_equal(ours, of.plain, net.name);
    EXPECT_GT(tier->use().written_bytes, 0U);
  }
}

}  // namespace
}  // namespace reef
