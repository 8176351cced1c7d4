// What becomes of .grad, whatever a program does with it between passes: at every stage as in one process
// that accumulates over all ranks' batches, or an error.
#include "distributed/shard_net.h"
#include "reef/error.h"

namespace reef::shard_tests {
namespace {

constexpr std::int64_t kIn = 300;

// Gradients that are sums of small whole numbers, so that no order of additions rounds.
torch::nn::Linear whole_numbers() {
  torch::nn::Linear layer(kIn, 8);
  const torch::NoGradGuard no_grad;
  layer->weight.copy_(torch::arange(8 * kIn).remainder(7).reshape({8, kIn}));
  layer->bias.copy_(torch::arange(8));
  return layer;
}
Tensor input(int of_rank, int pass) {
  return torch::arange(2 * kIn).remainder(5 + of_rank + 2 * pass).to(torch::kFloat).reshape({2, kIn});
}

struct Sharded {
  torch::nn::Linear layer = whole_numbers();
  Shard shard;
  torch::optim::SGD optimizer;
  explicit Sharded(Stage stage, bool offload)
      : shard(reef::shard(
            *layer, group(),
            {.stage = stage, .bucket_bytes = 5000, .reduction = Reduction::kSum, .offload = offload})),
        optimizer(shard.parameters(), 1.0) {}
  void pass(int number) { layer->forward(input(rank(), number)).sum().backward(); }
};

struct Alone {
  torch::nn::Linear layer = whole_numbers();
  torch::optim::SGD optimizer{layer->parameters(), 1.0};
  void pass(int number) {
    for (int of = 0; of < size(); ++of) layer->forward(input(of, number)).sum().backward();
  }
};

// What a program does between two passes.
struct Row {
  const char* name;
  std::function<void(torch::nn::Module&, torch::optim::Optimizer&)> between;
  bool refused_with_parts = false;
};
const std::vector<Row> kRows = {
    {"nothing", [](auto&, auto&) {}},
    {"optimizer.zero_grad", [](auto&, auto& optimizer) { optimizer.zero_grad(); }},
    {"optimizer.zero_grad in place",
     [](auto&, auto& optimizer) { optimizer.zero_grad(/*set_to_none=*/false); }},
    {"module.zero_grad", [](auto& module, auto&) { module.zero_grad(); }},
    {"module.zero_grad in place", [](auto& module, auto&) { module.zero_grad(/*set_to_none=*/false); }, true},
    {"both", [](auto& module, auto& optimizer) { module.zero_grad(), optimizer.zero_grad(); }},
    {"one is cleared", [](auto& module, auto&) { module.parameters()[0].mutable_grad() = Tensor(); }},
    {"a step", [](auto&, auto& optimizer) { optimizer.step(); }},
    {"a step, and module.zero_grad",
     [](auto& module, auto& optimizer) { optimizer.step(), module.zero_grad(); }},
    {"the module's gradients are scaled",
     [](auto& module, auto&) { module.parameters()[1].mutable_grad().mul_(2); }, true},
    {"an optimizer of the module's parameters steps",
     [](auto& module, auto&) { torch::optim::SGD(module.parameters(), 1.0).step(); }, true},
    {"the norm of the module's parameters is clipped",
     [](auto& module, auto&) { torch::nn::utils::clip_grad_norm_(module.parameters(), 1e9); }, true},
};

void train(Sharded& sharded, Alone& alone, const Row& row, const std::string& text) {
  sharded.pass(0);
  alone.pass(0);
  row.between(*alone.layer, alone.optimizer);
  bool refused = false;
  try {
    row.between(*sharded.layer, sharded.optimizer);
  } catch (const c10::Error& error) {
    refused = true;
    EXPECT_NE(std::string(error.what()).find("give the optimizer parameters() of the shard"),
              std::string::npos)
        << text << ": " << error.what();
  }
  const bool has_parts = !sharded.shard.parameters()[0].is_same(sharded.layer->weight);
  EXPECT_EQ(refused, row.refused_with_parts && has_parts) << text;
  if (refused) return;
  sharded.pass(1);
  alone.pass(1);
  sharded.optimizer.step();
  alone.optimizer.step();
  expect_same(*sharded.layer, *alone.layer, text);
}

TEST(ShardGradients, BetweenPassesAreAsInOneProcess) {
  for (const Stage stage : kStages) {
    for (const bool offload : {false, true}) {
      for (const Row& row : kRows) {
        Sharded sharded(stage, offload);
        Alone alone;
        train(sharded, alone, row,
              std::string(row.name) + ", stage " + std::to_string(static_cast<int>(stage)) +
                  (offload ? ", offload" : ""));
      }
    }
  }
}

// What passes in no_sync have added up is cleared with the module's gradients.
TEST(ShardGradients, WhatWasAddedUpWithoutSyncIsCleared) {
  for (const Stage stage : kStages) {
    for (const bool clears : {false, true}) {
      Sharded sharded(stage, false);
      Alone alone;
      {
        const Shard::NoSync paused(sharded.shard);
        sharded.pass(0);
      }
      if (clears) sharded.layer->zero_grad();
      if (!clears) alone.pass(0);
      sharded.pass(1);
      alone.pass(1);
      sharded.optimizer.step();
      alone.optimizer.step();
      expect_same(*sharded.layer, *alone.layer,
                  "stage " + std::to_string(static_cast<int>(stage)) + (clears ? ", cleared" : ""));
    }
  }
}

// Each rank would clip by a norm of its own.
TEST(ShardGradients, TorchsNormOfPartsIsRefused) {
  for (const Stage stage : kStages) {
    for (const double kind : {2.0, std::numeric_limits<double>::infinity()}) {
      Sharded sharded(stage, false);
      sharded.pass(0);
      std::vector<Tensor> before;
      for (const Tensor& part : sharded.shard.parameters()) before.push_back(part.grad().clone());
      const auto clip = [&] { torch::nn::utils::clip_grad_norm_(sharded.shard.parameters(), 1.0, kind); };
      if (stage == Stage::kReplicate || size() == 1) {
        clip();
        continue;
      }
      EXPECT_THROW(clip(), c10::Error);
      for (std::size_t i = 0; i < before.size(); ++i) {
        const Tensor gradient = sharded.shard.parameters()[i].grad();
        EXPECT_TRUE(torch::equal(gradient, before[i]));
        EXPECT_NO_THROW(gradient.norm().item<float>()) << "of one part";
      }
      EXPECT_NO_THROW(torch::nn::utils::clip_grad_norm_(whole_numbers()->parameters(), 1.0, kind));
    }
  }
}

// Each rank has as many batches as its number.
TEST(ShardGradients, RanksWithoutBatchesJoinThoseThatHaveThem) {
  for (const Stage stage : kStages) {
    Sharded sharded(stage, false);
    for (int number = 0; number < rank(); ++number) {
      sharded.optimizer.zero_grad();
      sharded.pass(number);
      sharded.optimizer.step();
    }
    int steps = rank();
    sharded.shard.join([&] {
      sharded.optimizer.step();
      ++steps;
    });
    EXPECT_EQ(steps, size() - 1);
    Alone alone;
    for (int number = 0; number < size() - 1; ++number) {
      alone.optimizer.zero_grad();
      for (int of = number + 1; of < size(); ++of) alone.layer->forward(input(of, number)).sum().backward();
      alone.optimizer.step();
    }
    expect_same(*sharded.layer, *alone.layer, "stage " + std::to_string(static_cast<int>(stage)));
    const Shard::NoSync paused(sharded.shard);
    EXPECT_THROW(sharded.shard.join([] {}), ConfigError);
  }
}

TEST(ShardGradients, AParameterHasOneShard) {
  for (const Stage stage : kStages) {
    torch::nn::Linear layer(kIn, 8);
    {
      Shard first = shard(*layer, group(), {.stage = stage});
      EXPECT_THROW(shard(*layer, group(), {.stage = stage}), ConfigError);
      first.gather();
    }
    shard(*layer, group(), {.stage = stage});
  }
}

}  // namespace
}  // namespace reef::shard_tests
