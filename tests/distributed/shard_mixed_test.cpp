// MixedPrecision: one process that keeps float32 masters, rounds them, and adds gradients up by itself.
#include <ATen/autocast_mode.h>

#include <limits>
#include <optional>
#include <tuple>

#include "reef/collectives.h"
#include "reef/error.h"
#include "reef/grad_scaler.h"
#include "reef/part.h"
#include "shard_net.h"
#include "support/config_error.h"

namespace reef::shard_tests {
namespace {

const std::vector<MixedPrecision> kMixed = {
    {at::kBFloat16, at::kFloat}, {at::kBFloat16, at::kBFloat16}, {at::kHalf, at::kFloat}};

std::string where(const MixedPrecision& mixed, Stage stage) {
  return std::string(c10::toString(mixed.parameters)) + ", sums of " + c10::toString(mixed.sums) +
         ", stage " + std::to_string(static_cast<int>(stage));
}

/// What a program does with a module that becomes 16 bits: its buffers are its own business.
Net net_of(at::ScalarType dtype) {
  Net net(7);
  net->scale.set_data(net->scale.to(dtype));
  return net;
}

/// The oracle: masters, and a module that is made of them.
struct Alone {
  Alone(const MixedPrecision& mixed_, const Case& tested) : mixed(mixed_), net(net_of(mixed.parameters)) {
    for (const Tensor& parameter : parameters_of(net)) {
      if (parameter.requires_grad()) masters.push_back(parameter.detach().clone().set_requires_grad(true));
    }
    net->to(mixed.parameters);
    for (const Tensor& parameter : parameters_of(net)) {
      if (parameter.requires_grad()) rounded.push_back(parameter);
    }
    optimizer = tested.make(masters);
  }

  void step(Ranks ranks, int number, int passes = 1, float scale = 1) {
    optimizer->zero_grad();
    std::vector<Tensor> sums(masters.size());
    for (int of = 0; of < size(); ++of) {
      std::vector<Tensor> of_rank(masters.size());
      for (int micro = 0; micro < passes; ++micro) {
        (net->forward(batch(ranks, of, number, micro)) * scale).backward();
        for (std::size_t i = 0; i < rounded.size(); ++i) take(of_rank[i], rounded[i].mutable_grad());
      }
      for (std::size_t i = 0; i < sums.size(); ++i) take(sums[i], of_rank[i]);
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      if (sums[i].defined()) masters[i].mutable_grad() = sums[i].div_(size()).to(at::kFloat).div_(scale);
    }
    optimizer->step();
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < masters.size(); ++i) rounded[i].copy_(masters[i]);
  }
  void take(Tensor& sum, Tensor& gradient) const {
    if (!gradient.defined()) return;
    const Tensor added = gradient.to(mixed.sums);
    sum = sum.defined() ? sum + added : added.clone();
    gradient = Tensor();
  }

  MixedPrecision mixed;
  Net net;
  std::vector<Tensor> masters, rounded;
  Optimizer optimizer;
};

/// This rank's masters are those of one process, and the module is that one's.
void expect_same(Shard& sharded, Net net, Alone& alone, const std::string& text) {
  sharded.gather();
  shard_tests::expect_same(*net, *alone.net, text);
  const StateDict whole = sharded.full_state_dict();
  const auto names = net->named_parameters();
  std::size_t i = 0;
  for (const auto& item : names) {
    if (!item.value().requires_grad() || item.key() == "tied") continue;
    EXPECT_TRUE(torch::equal(whole.at(item.key()), alone.masters[i]))
        << text << ": the master of " << item.key();
    ++i;
  }
  for (const Tensor& part : sharded.parameters()) EXPECT_EQ(part.scalar_type(), at::kFloat) << text;
}

TEST(ShardMixed, EveryStageIsOneProcessWithMasters) {
  for (const Case& tested : kCases) {
    for (const MixedPrecision& mixed : kMixed) {
      // Which at its rate takes this net out of float16's range.
      if (mixed.parameters == at::kHalf && tested.name == std::string("momentum")) continue;
      std::vector<Alone> alone = {{mixed, tested}, {mixed, tested}};
      for (int step = 0; step < kSteps; ++step) {
        alone[0].step(Ranks::kDiffer, step);
        alone[1].step(Ranks::kAlike, step);
      }
      for (const Stage stage : kStages) {
        for (const std::int64_t bucket_bytes : {std::int64_t{1}, std::int64_t{5000}, std::int64_t{1} << 25}) {
          Net net = net_of(mixed.parameters);
          Shard sharded =
              shard(*net, group(), {.stage = stage, .bucket_bytes = bucket_bytes, .mixed_precision = mixed});
          const Optimizer optimizer = tested.make(sharded.parameters());
          for (int step = 0; step < kSteps; ++step) {
            optimizer->zero_grad();
            net->forward(batch(ranks_at(stage), rank(), step)).backward();
            optimizer->step();
          }
          expect_same(sharded, net, alone[ranks_at(stage) == Ranks::kDiffer ? 0 : 1],
                      where(mixed, stage) + ", " + tested.name);
        }
      }
    }
  }
}

TEST(ShardMixed, SumsOfSeveralPassesAreOfTheirDtype) {
  for (const MixedPrecision& mixed : kMixed) {
    for (const Stage stage : kStages) {
      Alone alone(mixed, kCases[1]);
      alone.step(Ranks::kAlike, 0, 3);
      alone.step(Ranks::kAlike, 2, 2);
      Net net = net_of(mixed.parameters);
      Shard sharded = shard(*net, group(), {.stage = stage, .bucket_bytes = 5000, .mixed_precision = mixed});
      const Optimizer optimizer = kCases[1].make(sharded.parameters());
      for (const auto& [step, passes] : {std::pair{0, 3}, std::pair{2, 2}}) {
        optimizer->zero_grad();
        for (int micro = 0; micro < passes; ++micro) {
          std::optional<Shard::NoSync> no_sync;
          if (micro + 1 < passes) no_sync.emplace(sharded);
          net->forward(batch(Ranks::kAlike, rank(), step, micro)).backward();
        }
        optimizer->step();
      }
      expect_same(sharded, net, alone, where(mixed, stage));
    }
  }
}

// What was kept from the pass before, and lies where the next sums are about to be, is added to.
TEST(ShardMixed, GradientsThatAreKeptAreAddedTo) {
  for (const Stage stage : kStages) {
    const auto pass = [&](Net net, int step) { net->forward(batch(Ranks::kAlike, rank(), step)).backward(); };
    std::vector<std::vector<Tensor>> alone(2);
    for (int i = 0; i < 2; ++i) {
      Net net = net_of(at::kBFloat16);
      Shard sharded = shard(*net, group(), {.stage = stage, .mixed_precision = MixedPrecision{}});
      pass(net, 2 * i);
      for (const Tensor& part : sharded.parameters())
        alone[static_cast<std::size_t>(i)].push_back(part.grad());
    }
    Net net = net_of(at::kBFloat16);
    Shard sharded = shard(*net, group(), {.stage = stage, .mixed_precision = MixedPrecision{}});
    pass(net, 0);
    pass(net, 2);
    for (std::size_t i = 0; i < alone[0].size(); ++i) {
      ASSERT_EQ(sharded.parameters()[i].grad().defined(), alone[0][i].defined());
      if (!alone[0][i].defined()) continue;
      EXPECT_TRUE(torch::equal(sharded.parameters()[i].grad(), alone[0][i] + alone[1][i]))
          << sharded.names()[i];
    }
  }
}

// A module that is of 16 bits already begins with masters that are what it is.
TEST(ShardMixed, WhatHasSixteenBitsHasMastersToo) {
  for (const Stage stage : kStages) {
    Net net = net_of(at::kHalf);
    net->to(at::kHalf);
    Net before(7);
    before->to(at::kHalf);
    Shard sharded = shard(*net, group(), {.stage = stage, .mixed_precision = MixedPrecision{}});
    for (const auto& item : net->named_parameters()) EXPECT_EQ(item.value().scalar_type(), at::kHalf);
    const StateDict masters = sharded.full_state_dict();
    for (const auto& item : before->named_parameters()) {
      const Tensor master = masters.at(item.key());
      EXPECT_EQ(master.scalar_type(), item.value().requires_grad() ? at::kFloat : at::kHalf) << item.key();
      EXPECT_TRUE(torch::equal(master.to(at::kHalf), item.value())) << item.key();
    }
  }
}

// Of sizes that need no padding, of P parameters by Adam: 2 P for the module's, and of masters, states and
// gradients what the stage has.
TEST(ShardMixed, BytesAliveAndOnTheWireAreTheFormula) {
  const Ledger ledger;
  for (const MixedPrecision& mixed : {MixedPrecision{}, MixedPrecision{.sums = at::kBFloat16}}) {
    for (const Stage stage : kStages) {
      const std::int64_t before = settled_live_bytes();
      torch::nn::Linear layer(torch::nn::LinearOptions(512, 96 * size()).bias(false));
      const std::int64_t p = layer->weight.numel();
      const std::int64_t n = size();
      Shard sharded =
          shard(*layer, group(),
                {.stage = stage, .resident_bytes = std::int64_t{1} << 40, .mixed_precision = mixed});
      torch::optim::Adam optimizer(sharded.parameters());
      const Tensor input = torch::ones({2, 512}, at::kBFloat16);
      layer->forward(input).sum().backward();
      optimizer.step();
      if (stage != Stage::kParameters) sharded.gather();
      const std::int64_t sum = mixed.sums == at::kFloat ? 4 : 2;
      // Where sums are not float32 a gradient is a copy, and stages that keep sums keep both.
      const bool keeps_sums = stage == Stage::kReplicate || stage == Stage::kOptimizer;
      const std::int64_t own = stage == Stage::kReplicate ? p : p / n;
      const std::int64_t gradients = (keeps_sums ? sum * p : 0) + (keeps_sums && sum == 4 ? 0 : 4 * own);
      const std::int64_t whole = stage == Stage::kParameters ? 0 : 2 * p;
      EXPECT_EQ(settled_live_bytes() - before - static_cast<std::int64_t>(input.nbytes()),
                whole + 12 * own + gradients)
          << where(mixed, stage);
      const std::int64_t parameters = stage == Stage::kReplicate ? sum : 2;  // are gathered, or sums
      EXPECT_EQ(sharded.sent_bytes(), (n - 1) * (sum + parameters) * p / n) << where(mixed, stage);
    }
  }
}

// Saved after two steps at one stage, loaded at another, in 16 bits or not.
TEST(ShardMixed, StatesGoOnAtAnyStage) {
  const MixedPrecision mixed;
  for (const Case& tested : kCases) {
    Alone alone(mixed, tested);
    for (int step = 0; step < kSteps; ++step) alone.step(Ranks::kAlike, step);
    for (const Stage from : kStages) {
      const Stage to = kStages[(static_cast<std::size_t>(from) + 3) % 4];
      const auto steps = [&](Net net, torch::optim::Optimizer& optimizer, int first) {
        for (int step = first; step < first + 2; ++step) {
          optimizer.zero_grad();
          net->forward(batch(Ranks::kAlike, rank(), step)).backward();
          optimizer.step();
        }
      };
      Net net = net_of(at::kBFloat16);
      Shard first = shard(*net, group(), {.stage = from, .bucket_bytes = 5000, .mixed_precision = mixed});
      const Optimizer of_first = tested.make(first.parameters());
      steps(net, *of_first, 0);
      const StateDict whole = first.full_state_dict();
      const OptimizerState of_optimizer = first.full_optimizer_state(*of_first);

      Net other(8);
      other->scale.set_data(other->scale.to(at::kBFloat16));
      Shard second = shard(*other, group(), {.stage = to, .bucket_bytes = 3000, .mixed_precision = mixed});
      const Optimizer of_second = tested.make(second.parameters());
      second.load_state_dict({whole});
      second.load_optimizer_state(*of_second, {of_optimizer});
      steps(other, *of_second, 2);
      expect_same(second, other, alone, where(mixed, to) + ", " + tested.name);

      Net plain(9);
      Shard without = shard(*plain, group(), {.stage = to});
      without.load_state_dict({second.full_state_dict()});
      without.gather();
      EXPECT_TRUE(torch::equal(plain->up->weight, alone.masters[5])) << "loaded by a module of float32";
    }
  }
}

TEST(ShardMixed, WhatAProgramWritesGoesToTheMasters) {
  for (const Stage stage : kStages) {
    Net net = net_of(at::kBFloat16);
    Shard sharded = shard(*net, group(), {.stage = stage, .mixed_precision = MixedPrecision{}});
    torch::optim::SGD optimizer(sharded.parameters(), 0.1);
    net->forward(batch(Ranks::kAlike, rank(), 0)).backward();
    optimizer.step();
    {
      const torch::NoGradGuard no_grad;
      net->up->weight.mul_(0.5);  // of what the step has made
    }
    const Tensor written = net->up->weight.detach().clone();
    EXPECT_TRUE(torch::equal(sharded.full_state_dict().at("up.weight"), written.to(at::kFloat)));
    sharded.gather();
    EXPECT_TRUE(torch::equal(net->up->weight, written)) << static_cast<int>(stage);
  }
}

// In float16, of a loss that is scaled, as small gradients need: on one rank a gradient overflows, nobody
// steps.
TEST(ShardMixed, AStepThatOverflowsIsLeftOutOnAllRanks) {
  for (const Stage stage : kStages) {
    Alone alone({at::kHalf, at::kFloat}, kCases[1]);
    alone.step(Ranks::kAlike, 0, 1, 256);
    alone.step(Ranks::kAlike, 2, 1, 128);
    Net net = net_of(at::kHalf);
    Shard sharded = shard(
        *net, group(), {.stage = stage, .bucket_bytes = 3000, .mixed_precision = MixedPrecision{at::kHalf}});
    const Optimizer optimizer = kCases[1].make(sharded.parameters());
    GradScaler scaler({.init_scale = 256}, group());
    for (int step = 0; step < 3; ++step) {
      optimizer->zero_grad();
      Tensor loss = net->forward(batch(Ranks::kAlike, rank(), step));
      if (step == 1 && rank() == size() - 1) loss = loss * std::numeric_limits<float>::infinity();
      scaler.scale(loss).backward();
      EXPECT_EQ(scaler.step(*optimizer), step != 1);
      scaler.update();
    }
    expect_same(sharded, net, alone, "stage " + std::to_string(static_cast<int>(stage)));
  }
}

TEST(ShardMixed, TrainsInsideABudget) {
  for (const Stage stage : kStages) {
    const ShardOptions options{.stage = stage, .bucket_bytes = 300000, .mixed_precision = MixedPrecision{}};
    expect_same_inside_a_budget(training_of_a_chain(6, at::kBFloat16, options), 75,
                                "stage " + std::to_string(static_cast<int>(stage)));
  }
}

// Autocast needs no option: its copies are made of whole parameters, and gradients come in float32.
TEST(ShardMixed, AutocastIsOneProcessThatAccumulates) {
  const auto forward = [](Net net, const Tensor& given) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    const Tensor loss = net->forward(given);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    return loss;
  };
  Net expected(7);
  const Optimizer reference = kCases[1].make(parameters_of(expected));
  for (int step = 0; step < kSteps; ++step) {
    reference->zero_grad();
    for (int of = 0; of < size(); ++of) forward(expected, batch(Ranks::kAlike, of, step)).backward();
    for (const Tensor& parameter : parameters_of(expected)) {
      if (parameter.grad().defined()) parameter.grad().div_(size());
    }
    reference->step();
  }
  for (const Stage stage : kStages) {
    Net net(7);
    Shard sharded = shard(*net, group(), {.stage = stage, .bucket_bytes = 5000});
    const Optimizer optimizer = kCases[1].make(sharded.parameters());
    for (int step = 0; step < kSteps; ++step) {
      optimizer->zero_grad();
      forward(net, batch(Ranks::kAlike, rank(), step)).backward();
      optimizer->step();
    }
    sharded.gather();
    shard_tests::expect_same(*net, *expected, "autocast, stage " + std::to_string(static_cast<int>(stage)));
  }
}

TEST(ShardMixed, RefusesOtherDtypes) {
  const auto said = [](const MixedPrecision& mixed) {
    return test::config_error([&] { shard(*torch::nn::Linear(4, 4), group(), {.mixed_precision = mixed}); });
  };
  EXPECT_EQ(said({at::kDouble}),
            "reef::shard was given MixedPrecision with parameters of Double: give BFloat16 or Half.");
  EXPECT_EQ(
      said({at::kHalf, at::kBFloat16}),
      "reef::shard was given MixedPrecision with sums of BFloat16: give Float, or what the parameters are, "
      "Half.");
}

}  // namespace
}  // namespace reef::shard_tests
