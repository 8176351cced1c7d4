// ShardOptions::offload: parts are copies in host memory. On the CPU that is memory of their own.
#include <vector>

#include "shard_net.h"

namespace reef::shard_tests {
namespace {

TEST(ShardOffload, EveryStageIsOneProcessThatAccumulates) {
  for (const Case& tested : kCases) {
    for (const Stage stage : kStages) {
      Net expected = accumulated(tested, ranks_at(stage), Reduction::kMean);
      for (const std::int64_t bucket_bytes : {std::int64_t{5000}, std::int64_t{1} << 25}) {
        Net net(7 + rank());
        Shard sharded = shard(*net, group(), {.stage = stage, .bucket_bytes = bucket_bytes, .offload = true});
        const Optimizer optimizer = tested.make(sharded.parameters());
        for (int step = 0; step < kSteps; ++step) {
          optimizer->zero_grad();
          net->forward(batch(ranks_at(stage), rank(), step)).backward();
          optimizer->step();
          for (const Tensor& part : sharded.parameters()) {
            for (const Tensor& parameter : net->parameters())
              EXPECT_NE(part.storage().unsafeGetStorageImpl(), parameter.storage().unsafeGetStorageImpl());
          }
        }
        sharded.gather();
        expect_same(*net, *expected, where(tested, stage, bucket_bytes));
      }
    }
  }
}

// Beside mixed precision, clipping, a scaled loss and a step that is left out: as without.
TEST(ShardOffload, WithAllElseAsWithoutIt) {
  for (const Stage stage : kStages) {
    std::vector<StateDict> states;
    for (const bool offload : {false, true}) {
      Net net(7);
      net->scale.set_data(net->scale.to(at::kBFloat16));
      Shard sharded = shard(
          *net, group(),
          {.stage = stage, .bucket_bytes = 3000, .mixed_precision = MixedPrecision{}, .offload = offload});
      const Optimizer optimizer = kCases[2].make(sharded.parameters());
      GradScaler scaler({.init_scale = 256}, group());
      for (int step = 0; step < kSteps; ++step) {
        optimizer->zero_grad();
        step_scaled(net, sharded, *optimizer, scaler, Ranks::kAlike, step);
      }
      {
        const torch::NoGradGuard no_grad;
        net->norm->weight.mul_(0.5);  // what a program writes goes to the copies
      }
      states.push_back(sharded.full_state_dict());
    }
    for (const auto& entry : states[0])
      EXPECT_TRUE(torch::equal(entry.value(), states[1].at(entry.key())))
          << entry.key() << ", stage " << static_cast<int>(stage);
  }
}

TEST(ShardOffload, OnADeviceTheStepIsTheHosts) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  const auto run = [](Stage stage, bool offload) {
    torch::nn::Sequential net = net_on_a_device();
    Shard sharded = shard(*net, group(), {.stage = stage, .bucket_bytes = 300000, .offload = offload});
    for (const Tensor& part : sharded.parameters()) {
      EXPECT_EQ(part.is_cpu(), offload);
      EXPECT_EQ(part.is_pinned(), offload);
    }
    torch::optim::AdamW optimizer(sharded.parameters(), torch::optim::AdamWOptions(1e-3));
    for (int step = 0; step < 4; ++step) {
      torch::manual_seed(static_cast<std::uint64_t>(100 * step + rank()));
      optimizer.zero_grad();
      net->forward(torch::randn({64, 256}, net->parameters()[0].device())).pow(2).mean().backward();
      optimizer.step();
    }
    return sharded.full_state_dict();
  };
  for (const Stage stage : kStages) {
    const StateDict on_device = run(stage, false);
    for (const auto& entry : run(stage, true))  // a device's own step rounds otherwise
      EXPECT_TRUE(torch::allclose(entry.value(), on_device.at(entry.key()), 1e-4, 1e-6)) << entry.key();
  }
}

}  // namespace
}  // namespace reef::shard_tests
