// ShardOptions::shard_degree: what is divided is divided among some ranks, and each such set has a copy.
#include <optional>
#include <vector>

#include "reef/delayed_update.h"
#include "reef/error.h"
#include "reef/part.h"
#include "shard_net.h"

namespace reef::shard_tests {
namespace {

constexpr Stage kDivided[] = {Stage::kOptimizer, Stage::kGradients, Stage::kParameters};

std::vector<int> degrees() {
  std::vector<int> all;
  for (int degree = 1; degree <= size(); ++degree) {
    if (size() % degree == 0) all.push_back(degree);
  }
  return all;
}

std::string with(const std::string& text, int degree) {
  return text + ", among " + std::to_string(degree) + " ranks";
}

TEST(ShardHybrid, EveryDegreeIsOneProcessThatAccumulates) {
  for (const Case& tested : kCases) {
    for (const Stage stage : kDivided) {
      for (const Reduction reduction : {Reduction::kMean, Reduction::kSum}) {
        if (reduction == Reduction::kSum && &tested != &kCases[0]) continue;
        Net expected = accumulated(tested, ranks_at(stage), reduction);
        for (const int degree : degrees()) {
          Net net(7 + rank());
          Shard sharded =
              shard(*net, group(),
                    {.stage = stage, .bucket_bytes = 5000, .reduction = reduction, .shard_degree = degree});
          for (const Tensor& part : sharded.parameters()) EXPECT_EQ(part_of(part)->copy, rank() / degree);
          train_steps(net, sharded, tested, ranks_at(stage));
          expect_same(*net, *expected, with(where(tested, stage, 5000), degree));
        }
      }
    }
  }
}

// More than a chunk of what is exchanged, in numbers whose sum depends on its order.
TEST(ShardHybrid, TheOrderOfASumIsThatOfRanksInEveryChunk) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const std::int64_t rows = 900 * size();
    const auto gradient = [&](int of) {
      torch::manual_seed(static_cast<std::uint64_t>(of));
      return (torch::randn({rows, 1024}) * torch::randn({rows, 1024}).mul(8).exp2()).to(dtype);
    };
    Tensor expected = gradient(0);
    for (int of = 1; of < size(); ++of) expected += gradient(of);
    expected.div_(size());
    const auto make_layer = [&] {
      torch::nn::Linear layer(torch::nn::LinearOptions(1024, rows).bias(false));
      layer->to(dtype);
      return layer;
    };
    torch::nn::Linear replicated = make_layer();
    const Shard all = shard(*replicated, group(), {.stage = Stage::kReplicate});
    (replicated->weight * gradient(rank())).sum().backward();
    EXPECT_TRUE(torch::equal(replicated->weight.grad(), expected)) << dtype;
    for (const int degree : degrees()) {
      torch::nn::Linear layer = make_layer();
      Shard sharded = shard(*layer, group(), {.stage = Stage::kGradients, .shard_degree = degree});
      (layer->weight * gradient(rank())).sum().backward();
      const Tensor part = sharded.parameters().at(0);
      const Tensor own = expected.flatten().narrow(0, part_of(part)->first, part.numel());
      EXPECT_TRUE(torch::equal(part.grad().flatten(), own)) << dtype << ", among " << degree << " ranks";
    }
  }
}

// Of P parameters by Adam on ranks that have a copy among D: 16 P / D at stage kParameters, and so on. In a
// step all of N ranks send for gradients N (D - 1) / D P, and P from a copy to the next and back, for
// parameters N (D - 1) / D P, at kParameters with room for all of them.
TEST(ShardHybrid, BytesAreTheFormula) {
  const Ledger ledger;
  Tensor sent = torch::zeros({1}, torch::kLong);
  for (const Stage stage : kDivided) {
    for (const int degree : degrees()) {
      const std::int64_t before = settled_live_bytes();
      torch::nn::Linear layer(torch::nn::LinearOptions(512, 96 * size()).bias(false));
      const std::int64_t bytes = 4 * layer->weight.numel();
      Shard sharded = shard(
          *layer, group(), {.stage = stage, .resident_bytes = std::int64_t{1} << 40, .shard_degree = degree});
      torch::optim::Adam optimizer(sharded.parameters());
      layer->forward(torch::ones({2, 512})).sum().backward();
      optimizer.step();
      const std::int64_t d = degree;
      if (stage != Stage::kParameters) {
        sharded.gather();
        EXPECT_EQ(settled_live_bytes() - before,
                  stage == Stage::kOptimizer ? 2 * bytes + 3 * bytes / d : bytes + 4 * bytes / d)
            << "stage " << static_cast<int>(stage) << " among " << degree;
      }
      sent.fill_(sharded.sent_bytes());
      all_reduce({sent}, group());
      const std::int64_t copies = size() / d;
      EXPECT_EQ(sent.item<std::int64_t>(), 2 * size() * (d - 1) * bytes / d + 2 * (copies - 1) * bytes)
          << "stage " << static_cast<int>(stage) << " among " << degree;
    }
  }
}

// Beside masters, offload, clipping, a scaled loss and a step that is left out: as among all ranks.
TEST(ShardHybrid, WithAllElseAsAmongAllRanks) {
  for (const Stage stage : kDivided) {
    for (const bool offload : {false, true}) {
      std::optional<StateDict> expected;
      for (const int degree : degrees()) {
        Net net(7);
        net->scale.set_data(net->scale.to(at::kBFloat16));
        Shard sharded = shard(*net, group(),
                              {.stage = stage,
                               .bucket_bytes = 3000,
                               .shard_degree = degree,
                               .mixed_precision = MixedPrecision{},
                               .offload = offload});
        optim::AdamW adam(
            sharded.parameters(),
            optim::AdamWOptions(1e-2).state(optim::StateFormat::kInt8).min_quantized_numel(600));
        std::optional<DelayedUpdate> delayed;
        if (offload && stage != Stage::kParameters) delayed.emplace(adam, sharded);
        torch::optim::Optimizer& optimizer = delayed ? static_cast<torch::optim::Optimizer&>(*delayed) : adam;
        GradScaler scaler({.init_scale = 256}, group());
        for (int step = 0; step < kSteps; ++step) {
          delayed ? delayed->zero_grad() : adam.zero_grad();
          {
            const Shard::NoSync alone(sharded);
            scaler.scale(net->forward(batch(Ranks::kAlike, rank(), step, 1))).backward();
          }
          step_scaled(net, sharded, optimizer, scaler, Ranks::kAlike, step);
        }
        if (delayed) delayed->finish();
        const StateDict found = sharded.full_state_dict();
        if (!expected) expected = found;
        for (const auto& entry : *expected)
          EXPECT_TRUE(torch::equal(entry.value(), found.at(entry.key())))
              << entry.key() << ", stage " << static_cast<int>(stage) << " among " << degree;
      }
    }
  }
}

TEST(ShardHybrid, WhatDoesNotDivideIsRefused) {
  Net net(7);
  EXPECT_THROW(shard(*net, group(), {.stage = Stage::kGradients, .shard_degree = -1}), ConfigError);
  EXPECT_THROW(shard(*net, group(), {.stage = Stage::kGradients, .shard_degree = size() + 1}), ConfigError);
  EXPECT_THROW(shard(*net, group(), {.shard_degree = size()}), ConfigError);
  if (size() > 1) {
    EXPECT_THROW(shard(*net, group(), {.stage = Stage::kGradients, .shard_degree = rank() == 0 ? 1 : size()}),
                 ConfigError);
  }
}

}  // namespace
}  // namespace reef::shard_tests
