// Stages that are run again in backward, of a module that is sharded.
#include "reef/chain.h"
#include "reef/tier.h"
#include "shard_net.h"

namespace reef::shard_tests {
namespace {

namespace nn = torch::nn;

struct BlockImpl : nn::Module {
  BlockImpl() {
    register_module("up", up);
    register_module("down", down);
  }
  Tensor forward(const Tensor& x) { return down(torch::dropout(torch::gelu(up(x)), 0.2, true)); }
  nn::Linear up{48, 96}, down{96, 48};
};
TORCH_MODULE(Block);

nn::Sequential layers(std::uint64_t seed) {
  torch::manual_seed(seed);
  nn::Sequential all;
  for (int i = 0; i < 6; ++i) all->push_back(Block());
  return all;
}

Tensor input(int of_rank, int step) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + of_rank));
  return torch::randn({64, 48});
}

void expect_one_process(const Case& tested, Stage stage, std::optional<std::int64_t> resident_bytes,
                        const PlannedChainOptions& options = {}) {
  nn::Sequential expected = layers(7);
  const Optimizer alone = tested.make(expected->parameters());
  nn::Sequential net = layers(7 + static_cast<std::uint64_t>(rank()));
  Shard sharded =
      shard(*net, group(), {.stage = stage, .bucket_bytes = 20'000, .resident_bytes = resident_bytes});
  const Optimizer optimizer = tested.make(sharded.parameters());
  const ChainProfile& profile =
      plan_of(net, input(rank(), 0), std::int64_t{1} << 40, group(), options).profile;
  const std::uint64_t least = minimum_bytes(profile), most = natural_peak_bytes(profile);
  const auto budget_bytes = static_cast<std::int64_t>(least + (most - least) / (options.tier ? 2 : 3));
  const ScheduleCost& cost = plan_of(net, input(rank(), 0), budget_bytes, group(), options).cost;
  if (options.tier) {
    EXPECT_GT(cost.offloaded_bytes, 0U);
  } else {
    EXPECT_GT(cost.recomputed_seconds, 0);
  }
  for (int step = 0; step < kSteps; ++step) {
    alone->zero_grad();
    for (int of = 0; of < size(); ++of) expected->forward(input(of, step)).pow(2).mean().backward();
    for (const Tensor& parameter : expected->parameters()) parameter.grad().div_(size());
    alone->step();

    optimizer->zero_grad();
    checkpoint_sequential(net, input(rank(), step), budget_bytes, group(), options).pow(2).mean().backward();
    optimizer->step();
  }
  sharded.gather();
  expect_same(*net, *expected, where(tested, stage, 20'000));
}

TEST(ShardChain, EveryStageIsOneProcessThatAccumulates) {
  for (const Case& tested : kCases) {
    for (const Stage stage : kStages) expect_one_process(tested, stage, 0);
  }
  expect_one_process(kCases[0], Stage::kParameters, std::int64_t{1} << 30);
}

TEST(ShardChain, InsideABudget) {
  for (const Stage stage : kStages) {
    Budget budget(kPlenty, std::vector<const nn::Module*>{});
    expect_one_process(kCases[2], stage, std::nullopt);
  }
}

TEST(ShardChain, WithATierBesideEachRank) {
  PlannedChainOptions options;
  options.solver.solver = ChainSolver::kOffload;
  options.tier = host_tier(std::uint64_t{1} << 30);
  for (const Stage stage : kStages) expect_one_process(kCases[0], stage, 0, options);
}

}  // namespace
}  // namespace reef::shard_tests
