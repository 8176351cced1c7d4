// Run as several ranks by tests/support/ranks.py. Every rank computes by itself what one process would get
// that accumulates over all ranks' batches.
#include "reef/shard.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "reef/budget.h"
#include "reef/clip_grad_norm.h"
#include "reef/error.h"
#include "reef/grad_scaler.h"
#include "reef/ledger.h"
#include "shard_net.h"
#include "support/config_error.h"

namespace reef::shard_tests {
namespace {

using test::config_error;

TEST(Shard, EveryStageIsOneProcessThatAccumulates) {
  for (const Case& tested : kCases) {
    for (const Reduction reduction : {Reduction::kMean, Reduction::kSum}) {
      for (const Stage stage : kStages) {
        const Ranks ranks = ranks_at(stage);
        Net expected = accumulated(tested, ranks, reduction);
        for (const std::int64_t bucket_bytes : {std::int64_t{1}, std::int64_t{5000}, std::int64_t{1} << 25}) {
          Net net(7 + rank());  // rank 0's is broadcast
          Shard sharded =
              shard(*net, group(), {.stage = stage, .bucket_bytes = bucket_bytes, .reduction = reduction});
          train_steps(net, sharded, tested, ranks);
          expect_same(*net, *expected, where(tested, stage, bucket_bytes));
        }
      }
    }
  }
}

// Backward passes of which only the last is reduced: sums of sums, in the order of ranks.
TEST(Shard, NoSyncAddsUpOnTheRankFirst) {
  for (const Stage stage : kStages) {
    const Ranks ranks = ranks_at(stage);
    Net expected(7);
    std::vector<Tensor> parameters = parameters_of(expected);
    for (int of = 0; of < size(); ++of) {
      Net alone(7);
      for (int micro = 0; micro < 3; ++micro) alone->forward(batch(ranks, of, 0, micro)).backward();
      const std::vector<Tensor> theirs = parameters_of(alone);
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (!theirs[i].grad().defined()) continue;
        Tensor& sum = parameters[i].mutable_grad();
        sum = sum.defined() ? sum + theirs[i].grad() : theirs[i].grad().clone();
      }
    }
    const Optimizer reference = kCases[0].make(parameters);
    for (Tensor& parameter : parameters) {
      if (parameter.grad().defined()) parameter.mutable_grad().div_(size());
    }
    reference->step();

    Net net(7);
    Shard sharded = shard(*net, group(), {.stage = stage, .bucket_bytes = 5000});
    const Optimizer optimizer = kCases[0].make(sharded.parameters());
    const std::int64_t before = sharded.sent_bytes();
    {
      const Shard::NoSync no_sync(sharded);
      for (int micro = 0; micro < 2; ++micro) net->forward(batch(ranks, rank(), 0, micro)).backward();
    }
    if (stage != Stage::kParameters) {  // whose forward gathers
      EXPECT_EQ(sharded.sent_bytes(), before);
    }
    net->forward(batch(ranks, rank(), 0, 2)).backward();
    optimizer->step();
    sharded.gather();
    expect_same(*net, *expected, where(kCases[0], stage, 5000));
  }
}

// Gradients that have not been cleared are added to, not reduced once more; zeros are gradients, too.
TEST(Shard, GradientsThatAreKeptAreAddedTo) {
  for (const bool zeros : {false, true}) {
    std::vector<Tensor> first;  // of the parts, by stage
    for (const Stage stage : kStages) {
      const Ranks ranks = ranks_at(stage);
      Net net(7);
      Shard sharded =
          shard(*net, group(), {.stage = stage, .bucket_bytes = 5000, .reduction = Reduction::kSum});
      net->forward(batch(ranks, rank(), 0)).backward();
      std::vector<Tensor> before;
      for (const Tensor& part : sharded.parameters()) {
        if (part.grad().defined() && zeros) part.grad().zero_();
        before.push_back(part.grad().defined() ? part.grad().clone() : Tensor());
      }
      net->forward(batch(ranks, rank(), 2)).backward();  // with the same parity: the same parameters are used

      Net other(7);
      Shard alone =
          shard(*other, group(), {.stage = stage, .bucket_bytes = 5000, .reduction = Reduction::kSum});
      other->forward(batch(ranks, rank(), 2)).backward();
      for (std::size_t i = 0; i < before.size(); ++i) {
        const Tensor found = sharded.parameters()[i].grad();
        const Tensor added = alone.parameters()[i].grad();
        ASSERT_EQ(found.defined(), before[i].defined()) << sharded.names()[i];
        if (!found.defined()) continue;
        const Tensor expected = before[i].defined() && added.defined() ? before[i] + added : before[i];
        EXPECT_TRUE(torch::equal(found, expected))
            << sharded.names()[i] << ", stage " << static_cast<int>(stage);
      }
    }
  }
}

TEST(Shard, WhatNoRankUsesHasNoGradient) {
  for (const Stage stage : kStages) {
    Net net(7);
    Shard sharded = shard(*net, group(), {.stage = stage});
    net->forward(batch(ranks_at(stage), rank(), 0)).backward();
    for (std::size_t i = 0; i < sharded.names().size(); ++i) {
      const bool never = sharded.names()[i].starts_with("never");
      EXPECT_EQ(sharded.parameters()[i].grad().defined(), !never) << sharded.names()[i];
    }
    EXPECT_FALSE(net->never.grad().defined());
  }
}

TEST(Shard, EveryElementIsSteppedByOneRank) {
  Net net(7);
  std::int64_t all = 0;
  for (const Tensor& parameter : parameters_of(net)) all += parameter.requires_grad() ? parameter.numel() : 0;
  for (const Stage stage : kStages) {
    Net other(7);
    Shard sharded = shard(*other, group(), {.stage = stage, .bucket_bytes = 5000});
    Tensor own = torch::zeros({1}, torch::kLong);
    for (const Tensor& part : sharded.parameters()) own += part.numel();
    all_reduce({own}, group());
    EXPECT_EQ(own.item<std::int64_t>(), stage == Stage::kReplicate ? size() * all : all);
    EXPECT_EQ(sharded.names().size(), sharded.parameters().size());
  }
}

// Of sizes that need no padding: 2 (N - 1) / N of the parameters' bytes for each rank and step, at every
// stage, for kParameters with room for all of them.
TEST(Shard, BytesOnTheWireAreTheFormula) {
  for (const Stage stage : kStages) {
    torch::nn::Linear layer(256, 12 * static_cast<std::int64_t>(size()));
    layer->bias.set_requires_grad(false);
    Shard sharded = shard(*layer, group(), {.stage = stage, .resident_bytes = std::int64_t{1} << 40});
    torch::optim::SGD optimizer(sharded.parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      layer->forward(torch::ones({2, 256})).sum().backward();
      optimizer.step();
    }
    if (stage != Stage::kParameters) sharded.gather();
    const std::int64_t bytes = 4 * layer->weight.numel();
    EXPECT_EQ(sharded.sent_bytes(), 3 * 2 * (size() - 1) * bytes / size()) << static_cast<int>(stage);
  }
}

// Of P parameters in float32 by Adam: 16 P; 8 P + 12 P / N; 4 P + 16 P / N; 16 P / N. When gradients are
// cleared their memory is free; of whole gradients on the CPU, outside a budget, the first three quarters are
// kept for the next step.
TEST(Shard, BytesAliveAfterAStepAreTheFormula) {
  const Ledger ledger;
  for (const bool within : {false, true}) {
    std::optional<Budget> budget;
    if (within) budget.emplace(kPlenty, std::vector<const torch::nn::Module*>{});
    for (const Stage stage : kStages) {
      const std::string what =
          "stage " + std::to_string(static_cast<int>(stage)) + (within ? ", within" : "");
      const std::int64_t before = settled_live_bytes();
      torch::nn::Linear layer(torch::nn::LinearOptions(512, 96 * size()).bias(false));
      const std::int64_t bytes = 4 * layer->weight.numel();
      Shard sharded = shard(*layer, group(), {.stage = stage});
      torch::optim::Adam optimizer(sharded.parameters());
      const auto train = [&] {
        layer->forward(torch::ones({2, 512})).sum().backward();
        optimizer.step();
        if (stage != Stage::kParameters) sharded.gather();
      };
      train();
      const std::int64_t n = size();
      const std::int64_t expected = stage == Stage::kReplicate   ? 4 * bytes
                                    : stage == Stage::kOptimizer ? 2 * bytes + 3 * bytes / n
                                    : stage == Stage::kGradients ? bytes + 4 * bytes / n
                                                                 : 4 * bytes / n;
      EXPECT_EQ(settled_live_bytes() - before, expected) << what;
      if (stage == Stage::kReplicate) {
        optimizer.zero_grad(/*set_to_none=*/false);  // their memory is used again
        train();
        EXPECT_EQ(settled_live_bytes() - before, expected) << what;
      }
      optimizer.zero_grad();
      const std::int64_t gradients = stage >= Stage::kGradients ? bytes / n : within ? bytes : 0;
      EXPECT_EQ(settled_live_bytes() - before, expected - gradients) << what;
    }
  }
}

// Between backward and the step a parameter may be read, and it is what it was; after it, it is what all
// ranks have made of it. So is one that a rank reads when the step was left out, which the others do not
// read.
TEST(Shard, ParametersAreReadWhenTheyMay) {
  for (const Stage stage : {Stage::kOptimizer, Stage::kGradients}) {
    Net net(7);
    Shard sharded = shard(*net, group(), {.stage = stage, .bucket_bytes = 5000});
    torch::optim::SGD optimizer(sharded.parameters(), 1.0);
    const Tensor old = net->up->weight.detach().clone();
    net->forward(batch(Ranks::kDiffer, rank(), 0)).backward();
    {
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(torch::equal(net->up->weight.clone(), old));
    }
    optimizer.step();
    Tensor now = net->up->weight.detach().clone();  // the first that is read
    EXPECT_FALSE(torch::equal(now, old));
    Tensor of_first = now.clone();
    broadcast({of_first}, group());
    EXPECT_TRUE(torch::equal(now, of_first));

    optimizer.zero_grad();
    net->forward(batch(Ranks::kDiffer, rank(), 1)).backward();  // and no step
    net->norm->weight.mul(2);                                   // all ranks, recorded: the next forward
    if (rank() == 0) {
      EXPECT_TRUE(torch::equal(net->up->weight.detach().clone(), now));
    }
  }
}

TEST(Shard, SixteenBitsAreAddedAsAnAccumulationAdds) {
  for (const auto dtype : {torch::kBFloat16, torch::kDouble}) {
    for (const Stage stage : kStages) {
      const Ranks ranks = ranks_at(stage);
      Net expected(7);
      expected->to(dtype);
      torch::optim::SGD reference(parameters_of(expected), 0.1);
      for (int of = 0; of < size(); ++of) expected->forward(batch(ranks, of, 0)).backward();
      reference.step();

      Net net(7);
      net->to(dtype);
      Shard sharded =
          shard(*net, group(), {.stage = stage, .bucket_bytes = 5000, .reduction = Reduction::kSum});
      torch::optim::SGD optimizer(sharded.parameters(), 0.1);
      net->forward(batch(ranks, rank(), 0)).backward();
      optimizer.step();
      sharded.gather();
      expect_same(*net, *expected, "stage " + std::to_string(static_cast<int>(stage)));
    }
  }
}

// What the ranks send stays where it is; all else moves.
TEST(Shard, TrainsInsideABudget) {
  for (const Stage stage : kStages) {
    const ShardOptions options{.stage = stage, .bucket_bytes = 300000};
    expect_same_inside_a_budget(training_of_a_chain(4, at::kFloat, options), 70,
                                "stage " + std::to_string(static_cast<int>(stage)));
  }
}

// On one rank, in one parameter, of which another has the part: nobody steps.
TEST(Shard, AStepThatOverflowsIsLeftOutOnAllRanks) {
  for (const Case& tested : kCases) {
    for (const Stage stage : kStages) {
      const Ranks ranks = Ranks::kAlike;
      Net expected(7);
      const Optimizer reference = tested.make(parameters_of(expected));
      for (const int step : {0, 2, 3}) {
        reference->zero_grad();
        accumulate(expected, ranks, step);
        reef::clip_grad_norm_(parameters_of(expected), 0.02);
        reference->step();
      }
      Net net(7);
      Shard sharded = shard(*net, group(), {.stage = stage, .bucket_bytes = 3000});
      const Optimizer optimizer = tested.make(sharded.parameters());
      GradScaler scaler({.init_scale = 1024, .growth_interval = 2}, group());
      for (int step = 0; step < kSteps; ++step) {
        optimizer->zero_grad();
        Tensor loss = net->forward(batch(ranks, rank(), step));
        if (step == 1) {
          loss = loss +
                 net->up->bias[3] * (rank() == size() - 1 ? std::numeric_limits<double>::infinity() : 0.0);
        }
        scaler.scale(loss).backward();
        scaler.unscale_(*optimizer);
        const double norm = clip_grad_norm_(sharded.parameters(), 0.02, group());
        EXPECT_EQ(std::isfinite(norm), step != 1);
        EXPECT_EQ(scaler.step(*optimizer), step != 1);
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), step == 0 || step == 3 ? 1024 : 512);  // two good steps double it
      }
      sharded.gather();
      expect_same(*net, *expected, where(tested, stage, 3000));
    }
  }
}

TEST(Shard, RanksThatDisagreeAreToldTheFirstDifference) {
  const auto expect = [](const std::string& found, const std::string& part) {
    if (size() == 1) {
      EXPECT_EQ(found, "");
    } else {
      EXPECT_NE(found.find(part), std::string::npos) << found << " on rank " << rank();
    }
  };
  const bool odd = rank() == size() - 1 && size() > 1;
  const std::string last = " on rank " + std::to_string(size() - 1);
  expect(config_error([&] { shard(*torch::nn::Linear(4, odd ? 5 : 4), group()); }),
         "number 1 is parameter weight of Float [4, 4], which requires a gradient on rank 0, and parameter "
         "weight of "
         "Float [5, 4], which requires a gradient" +
             last);
  expect(config_error([&] { shard(*torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(!odd)), group()); }),
         "number 2 is parameter bias of Float [4], which requires a gradient on rank 0, and nothing more" +
             last);
  expect(config_error([&] { shard(*torch::nn::Linear(4, 4), group(), {.bucket_bytes = odd ? 1 : 2}); }),
         "number 0 is stage 0, bucket_bytes 2, reduction 1, buffers 0 on rank 0, and stage 0, "
         "bucket_bytes 1");
  const bool last_rank = rank() == size() - 1;
  const std::string wrong =
      config_error([&] { shard(*torch::nn::Linear(4, 4), group(), {.bucket_bytes = last_rank ? 0 : 1}); });
  const std::string said = "reef::shard was given bucket_bytes 0: give a positive number.";
  EXPECT_EQ(wrong, last_rank ? said : "rank " + std::to_string(size() - 1) + ": " + said);
}

TEST(Shard, AScalerIsUsedInOrder) {
  EXPECT_NE(config_error([] { GradScaler({.init_scale = 0}); }).find("init_scale is not positive"),
            std::string::npos);
  EXPECT_NE(config_error([] { GradScaler({.growth_factor = 1}); }).find("growth_factor"), std::string::npos);
  EXPECT_NE(config_error([] { GradScaler({.backoff_factor = 1}); }).find("backoff_factor"),
            std::string::npos);
  GradScaler scaler;
  EXPECT_NE(config_error([&] { scaler.update(); }).find("update() before any step"), std::string::npos);
  torch::nn::Linear layer(4, 4);
  torch::optim::SGD optimizer(layer->parameters(), 0.1);
  scaler.scale(layer->forward(torch::ones({1, 4})).sum()).backward();
  scaler.unscale_(optimizer);
  EXPECT_NE(config_error([&] { scaler.unscale_(optimizer); }).find("have been unscaled"), std::string::npos);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_NE(config_error([&] { scaler.step(optimizer); }).find("has been stepped"), std::string::npos);
  torch::nn::Linear half(4, 4);
  half->to(torch::kHalf);
  torch::optim::SGD of_half(half->parameters(), 0.1);
  half->weight.mutable_grad() = torch::ones_like(half->weight);
  EXPECT_NE(config_error([&] { scaler.unscale_(of_half); }).find("a gradient is float16"), std::string::npos);
}

TEST(Shard, RefusesWhatItCannotDo) {
  torch::nn::Linear layer(4, 4);
  EXPECT_NE(config_error([&] { shard(*layer, nullptr); }).find("no process group"), std::string::npos);
  EXPECT_NE(config_error([&] { shard(*layer, group(), {.bucket_bytes = 0}); }).find("bucket_bytes 0"),
            std::string::npos);
  torch::nn::Embedding sparse(torch::nn::EmbeddingOptions(10, 4).sparse(true));
  Shard sharded = shard(*sparse, group());
  const std::string said =
      config_error([&] { sparse->forward(torch::zeros({2}, torch::kLong)).sum().backward(); });
  EXPECT_NE(said.find("parameter weight has a sparse gradient"), std::string::npos) << said;
}

TEST(Shard, BuffersBecomeAlikeWhenGradientsHaveBeenReduced) {
  const auto rows = [](int of) {
    torch::manual_seed(static_cast<std::uint64_t>(of));
    return torch::randn({8, 300});
  };
  const auto made = [] {
    torch::manual_seed(1);
    return torch::nn::Sequential(torch::nn::BatchNorm1d(300), torch::nn::Linear(300, 2));
  };
  std::vector<Tensor> means;
  for (int of = 0; of < size(); ++of) {
    torch::nn::Sequential alone = made();
    alone->forward(rows(of));
    means.push_back(alone->named_buffers()["0.running_mean"].clone());
  }
  for (const Stage stage : kStages) {
    for (const auto& [how, expected] :
         std::vector<std::pair<Buffers, Tensor>>{{Buffers::kLocal, means[static_cast<std::size_t>(rank())]},
                                                 {Buffers::kBroadcast, means[0]},
                                                 {Buffers::kMean, torch::stack(means).mean(0)}}) {
      torch::nn::Sequential net = made();
      Shard sharded = shard(*net, group(), {.stage = stage, .buffers = how});
      const auto pass = [&] { net->forward(rows(rank())).square().mean().backward(); };
      {
        const Shard::NoSync no_sync(sharded);
        net->eval();
        pass();
        net->train();
      }
      pass();
      const auto buffers = net->named_buffers();
      EXPECT_TRUE(torch::allclose(buffers["0.running_mean"], expected, 1e-6, 1e-7))
          << static_cast<int>(stage) << static_cast<int>(how);
      EXPECT_EQ(buffers["0.num_batches_tracked"].item<std::int64_t>(), 1);
    }
  }
}

TEST(Shard, IgnoredParametersAreEachRanksOwn) {
  const auto made = [] {
    Net net(7);
    torch::NoGradGuard no_grad;
    net->up->weight.mul_(1 + rank());
    return net;
  };
  Net alone = made();
  alone->forward(batch(Ranks::kAlike, rank(), 0)).backward();
  for (const Stage stage : kStages) {
    Net net = made();
    Shard sharded = shard(*net, group(), {.stage = stage, .ignored = {net->up->weight, net->up->bias}});
    EXPECT_TRUE(torch::equal(net->up->weight, alone->up->weight));
    for (const std::string& name : sharded.names()) EXPECT_NE(name.rfind("up.", 0), 0U) << name;
    net->forward(batch(Ranks::kAlike, rank(), 0)).backward();
    EXPECT_TRUE(torch::equal(net->up->weight.grad(), alone->up->weight.grad()));
    const StateDict saved = sharded.full_state_dict();
    EXPECT_TRUE(torch::equal(saved.at("up.weight"), alone->up->weight));
    sharded.load_state_dict({saved});
    EXPECT_TRUE(torch::equal(net->up->weight, alone->up->weight));
  }
  EXPECT_THROW(shard(*Net(7), group(), {.ignored = {torch::zeros(3)}}), ConfigError);
}

}  // namespace
}  // namespace reef::shard_tests
