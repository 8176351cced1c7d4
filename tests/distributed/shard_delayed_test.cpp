// DelayedUpdate: the step beside the next pass is, bit for bit, the recurrence that it says it is.
#include <torch/optim/schedulers/step_lr.h>

#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "reef/delayed_update.h"
#include "reef/error.h"
#include "shard_net.h"

namespace reef::shard_tests {
namespace {

constexpr Stage kWhole[] = {Stage::kReplicate, Stage::kOptimizer, Stage::kGradients};
constexpr int kDelayed = 6;

std::vector<Tensor> values_of(const Net& net) {
  std::vector<Tensor> values;
  for (const Tensor& parameter : parameters_of(net)) values.push_back(parameter.detach().clone());
  return values;
}
void set_values(const Net& net, const std::vector<Tensor>& values) {
  const torch::NoGradGuard no_grad;
  const std::vector<Tensor> parameters = parameters_of(net);
  for (std::size_t i = 0; i < values.size(); ++i) parameters[i].copy_(values[i]);
}

// One process that has, before each step, the gradient at what the step before the last one made. `finished`:
// after that step the delay ends.
Net delayed_alone(const Case& tested, int finished) {
  Net net(7);
  const Optimizer optimizer = tested.make(parameters_of(net));
  std::vector<Tensor> seen = values_of(net);  // by the next pass
  for (int step = 0; step < kDelayed; ++step) {
    std::vector<Tensor> newest = values_of(net);
    set_values(net, seen);
    optimizer->zero_grad();
    accumulate(net, Ranks::kDiffer, step);
    set_values(net, newest);
    optimizer->step();
    seen = step == finished ? values_of(net) : std::move(newest);
  }
  return net;
}

TEST(ShardDelayed, EveryStageIsItsRecurrence) {
  for (const Case& tested : kCases) {
    for (const int finished : {-1, 2}) {
      Net expected = delayed_alone(tested, finished);
      for (const Stage stage : kWhole) {
        for (const std::int64_t bucket_bytes : {std::int64_t{5000}, std::int64_t{1} << 25}) {
          Net net(7 + rank());
          Shard sharded =
              shard(*net, group(), {.stage = stage, .bucket_bytes = bucket_bytes, .offload = true});
          const Optimizer optimizer = tested.make(sharded.parameters());
          DelayedUpdate delayed(*optimizer, sharded);
          for (int step = 0; step < kDelayed; ++step) {
            delayed.zero_grad();
            net->forward(batch(Ranks::kDiffer, rank(), step)).backward();
            delayed.step();
            if (step == finished) delayed.finish();
          }
          sharded.gather();
          expect_same(*net, *expected, where(tested, stage, bucket_bytes));
        }
      }
    }
  }
}

// What a module computes between a step and the next is by the parameters from before it.
TEST(ShardDelayed, ParametersStayUntilTheNextStep) {
  Net net(7);
  Shard sharded = shard(*net, group(), {.stage = Stage::kGradients, .bucket_bytes = 5000, .offload = true});
  optim::AdamW adam(sharded.parameters(), optim::AdamWOptions(1e-2));
  DelayedUpdate delayed(adam, sharded);
  std::vector<Tensor> seen;
  const auto weight = [](const Net& of) { return of->tokens->weight.detach().clone(); };
  for (int step = 0; step < 3; ++step) {
    net->forward(batch(Ranks::kDiffer, rank(), step)).backward();
    delayed.step();
    seen.push_back(weight(net));
    if (step == 1) sharded.full_state_dict();  // looking changes nothing
  }
  EXPECT_TRUE(torch::equal(seen[0], weight(Net(7))));
  EXPECT_FALSE(torch::equal(seen[1], seen[0]));
  EXPECT_FALSE(torch::equal(seen[2], seen[1]));
  delayed.finish();
  EXPECT_FALSE(torch::equal(weight(net), seen[2]));
  StateDict whole = sharded.full_state_dict();
  EXPECT_TRUE(torch::equal(whole.at("tokens.weight"), net->tokens->weight));
}

// Schedulers, the norm and scaled losses find an optimizer in it; passes without sync add up as ever.
TEST(ShardDelayed, TheLoopIsAsItWas) {
  for (const Stage stage : kWhole) {
    std::vector<std::vector<Tensor>> found;
    for (const bool beside : {false, true}) {
      Net net(7);
      Shard sharded = shard(*net, group(), {.stage = stage, .bucket_bytes = 5000, .offload = true});
      torch::optim::AdamW adam(sharded.parameters(), torch::optim::AdamWOptions(1e-2));
      std::optional<DelayedUpdate> delayed;
      if (beside) delayed.emplace(adam, sharded);
      torch::optim::Optimizer& optimizer = beside ? static_cast<torch::optim::Optimizer&>(*delayed) : adam;
      torch::optim::StepLR schedule(optimizer, /*step_size=*/2, /*gamma=*/0.5);
      GradScaler scaler({.init_scale = 256}, group());
      for (int step = 0; step < kDelayed; ++step) {
        if (beside) {
          delayed->zero_grad();
        } else {
          adam.zero_grad();
        }
        {
          const Shard::NoSync alone(sharded);
          scaler.scale(net->forward(batch(Ranks::kDiffer, rank(), step, 1))).backward();
        }
        step_scaled(net, sharded, optimizer, scaler, Ranks::kDiffer, step);
        schedule.step();
        if (beside) delayed->finish();  // so without a delay
      }
      found.push_back(values_of(net));
      if (beside) {
        EXPECT_EQ(adam.param_groups()[0].options().get_lr(), 0.0025);
        std::stringstream theirs, ours;
        torch::save(adam, theirs);
        torch::serialize::OutputArchive archive;
        delayed->save(archive);
        archive.save_to(ours);
        EXPECT_EQ(ours.str().size(), theirs.str().size());
      }
    }
    for (std::size_t i = 0; i < found[0].size(); ++i)
      EXPECT_TRUE(torch::equal(found[0][i], found[1][i])) << i << ", stage " << static_cast<int>(stage);
  }
}

// What a pass that sends nothing, or one that fails, makes of gradients that the module has cleared is no
// business of the update, which still steps by those that it was lent.
TEST(ShardDelayed, AnUpdateKeepsItsGradients) {
  for (const Stage stage : kWhole) {
    for (const bool fails : {false, true}) {
      Net net(7);
      Shard sharded = shard(*net, group(), {.stage = stage, .bucket_bytes = 5000, .offload = true});
      UpdateBeside update(sharded);
      net->forward(batch(Ranks::kDiffer, rank(), 0)).backward();
      update.begin();
      update.wait_for_parts();
      std::vector<Tensor> lent;
      for (const Tensor& part : sharded.parameters()) lent.push_back(part.grad());
      net->zero_grad();
      const auto pass = [&](int step) {
        Tensor loss = net->forward(batch(Ranks::kDiffer, rank(), step));
        if (fails) loss.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("too large"); });
        loss.backward();
      };
      if (fails) {
        EXPECT_THROW(pass(1), std::runtime_error);
      } else {
        const Shard::NoSync no_sync(sharded);
        pass(1);
      }
      for (std::size_t i = 0; i < lent.size(); ++i) {
        EXPECT_TRUE(lent[i].defined() == sharded.parameters()[i].grad().defined())
            << sharded.names()[i] << ", stage " << static_cast<int>(stage) << ", fails: " << fails;
      }
      update.end();
      update.finish();
    }
  }
}

TEST(ShardDelayed, ResumesWhereItFinished) {
  const auto train = [&](Net& net, DelayedUpdate& delayed, int first, int last) {
    for (int step = first; step < last; ++step) {
      delayed.zero_grad();
      net->forward(batch(Ranks::kDiffer, rank(), step)).backward();
      delayed.step();
    }
    delayed.finish();
  };
  Net net(7), other(8);
  Shard sharded = shard(*net, group(), {.stage = Stage::kGradients, .offload = true});
  optim::AdamW adam(sharded.parameters(), optim::AdamWOptions(1e-2));
  DelayedUpdate delayed(adam, sharded);
  train(net, delayed, 0, 3);
  const StateDict module = sharded.full_state_dict();
  const OptimizerState states = sharded.full_optimizer_state(adam);
  train(net, delayed, 3, kDelayed);

  Shard resumed = shard(*other, group(), {.stage = Stage::kOptimizer, .offload = true});
  optim::AdamW adam2(resumed.parameters(), optim::AdamWOptions(1e-2));
  DelayedUpdate delayed2(adam2, resumed);
  resumed.load_state_dict({module});
  resumed.load_optimizer_state(adam2, {states});
  train(other, delayed2, 3, kDelayed);
  expect_same(*other, *net, "resumed");
}

TEST(ShardDelayed, WhatAStepThrowsTheNextOneThrows) {
  Net net(7);
  Shard sharded = shard(*net, group(), {.stage = Stage::kReplicate, .offload = true});
  optim::AdamW adam(sharded.parameters(), optim::AdamWOptions(1e-2));
  DelayedUpdate delayed(adam, sharded);
  const auto pass = [&](int step, double factor) {
    (net->forward(batch(Ranks::kDiffer, rank(), step)) * factor).backward();
  };
  pass(0, std::numeric_limits<double>::quiet_NaN());
  delayed.step();
  pass(1, 1);
  EXPECT_THROW(delayed.step(), NonFiniteGradient);
  delayed.step();  // the gradients are still there
  delayed.finish();
  for (const Tensor& parameter : parameters_of(net)) EXPECT_TRUE(parameter.isfinite().all().item<bool>());
}

TEST(ShardDelayed, OnADeviceAsOffloadAlone) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  const auto run = [](Stage stage, bool beside) {
    torch::nn::Sequential net = net_on_a_device();
    Shard sharded = shard(*net, group(), {.stage = stage, .bucket_bytes = 300000, .offload = true});
    torch::optim::AdamW adam(sharded.parameters(), torch::optim::AdamWOptions(1e-3));
    std::optional<DelayedUpdate> delayed;
    if (beside) delayed.emplace(adam, sharded);
    for (int step = 0; step < kDelayed; ++step) {
      torch::manual_seed(static_cast<std::uint64_t>(100 * step + rank()));
      if (beside) {
        delayed->zero_grad();
      } else {
        adam.zero_grad();
      }
      net->forward(torch::randn({64, 256}, net->parameters()[0].device())).pow(2).mean().backward();
      if (!beside) {
        adam.step();
      } else {
        delayed->step();
        delayed->finish();
      }
    }
    return sharded.full_state_dict();
  };
  for (const Stage stage : kWhole) {
    const StateDict alone = run(stage, false);
    for (const auto& entry : run(stage, true))
      EXPECT_TRUE(torch::allclose(entry.value(), alone.at(entry.key()), 1e-5, 1e-7)) << entry.key();
  }
}

TEST(ShardDelayed, WhatItCannotDoItRefuses) {
  for (const Stage stage : kStages) {
    for (const bool offload : {false, true}) {
      if (offload && stage != Stage::kParameters) continue;
      Net net(7);
      Shard sharded = shard(*net, group(), {.stage = stage, .offload = offload});
      torch::optim::SGD sgd(sharded.parameters(), torch::optim::SGDOptions(0.1));
      EXPECT_THROW(DelayedUpdate(sgd, sharded), ConfigError);
    }
  }
  Net net(7);
  Shard sharded = shard(*net, group(), {.offload = true});
  torch::optim::SGD sgd(sharded.parameters(), torch::optim::SGDOptions(0.1));
  DelayedUpdate delayed(sgd, sharded);
  EXPECT_THROW(DelayedUpdate(sgd, sharded), ConfigError);
  EXPECT_THROW(delayed.step([] { return torch::zeros({}); }), ConfigError);
}

}  // namespace
}  // namespace reef::shard_tests
