// LocalUpdates in the middle of a round, saved and loaded; and what a compression holds back in rounds.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "distributed/through_file.h"
#include "local_alone.h"
#include "reef/error.h"

namespace reef::shard_tests {
namespace {

// From any step, by files, to the bits of a run without a break: with what is under way and held back.
TEST(LocalUpdates, GoesOnFromAnyStepOfARound) {
  for (const Compression compression :
       {Compression::kNone, Compression::kBFloat16, Compression::kTopK, Compression::kDgc}) {
    for (const std::int64_t overlap : {0, 1, 3}) {
      LocalUpdatesOptions options{.local_steps = 4,
                                  .compression = compression,
                                  .parts = 2,
                                  .overlap_steps = overlap,
                                  .mixing = overlap == 1 ? 0.5 : 0};
      if (compression == Compression::kTopK || has_momentum(compression))
        options.compression_options.density = {{0, 0.5}, {2, 0.01}};
      if (has_momentum(compression)) options.outer_momentum = 0;
      constexpr int kTaken = 11;
      Net expected(7);
      Shard without_break = shard(*expected, group(), {.bucket_bytes = 5000});
      const Optimizer at_once = kInner[0].make(without_break.parameters());
      LocalUpdates all(without_break, options);
      std::vector<OptimizerState> states, of_optimizer;
      for (int taken = 0; taken < kTaken; ++taken) {
        states.push_back(through_file(all.state()));
        of_optimizer.push_back(through_file(without_break.sharded_optimizer_state(*at_once)));
        step(expected, *at_once, all, taken);
      }
      for (int taken = 0; taken < kTaken; ++taken) {
        const std::string text = std::string(name_of(compression)) + ", " + std::to_string(overlap) +
                                 " later, from " + std::to_string(taken);
        Net net(9 + rank());
        Shard sharded = shard(*net, group(), {.bucket_bytes = 5000});
        const Optimizer optimizer = kInner[0].make(sharded.parameters());
        LocalUpdates updates(sharded, options);
        sharded.load_optimizer_state(*optimizer, {of_optimizer[static_cast<std::size_t>(taken)]});
        updates.load_state(states[static_cast<std::size_t>(taken)]);
        EXPECT_EQ(updates.local_step(), taken) << text;
        {
          const torch::NoGradGuard no_grad;  // no parameters of LocalUpdates
          net->frozen.copy_(expected->frozen);
          net->scale.copy_(expected->scale);
        }
        for (int number = taken; number < kTaken; ++number) step(net, *optimizer, updates, number);
        expect_same(*net, *expected, text);
      }
    }
  }
}

using Change = std::function<void(OptimizerState&)>;

// Whatever is wrong with the state of one rank is told on all, and nothing has changed.
TEST(LocalUpdates, WrongStatesAreRefusedOnAllRanks) {
  Net net(7);
  Shard sharded = shard(*net, group(), {.bucket_bytes = 5000});
  const Optimizer optimizer = kInner[0].make(sharded.parameters());
  LocalUpdates updates(sharded, {.local_steps = 4, .compression = Compression::kBFloat16});
  for (int number = 0; number < 5; ++number) step(net, *optimizer, updates, number);
  const OptimizerState right = updates.state();
  std::vector<Tensor> before;
  for (const Tensor& parameter : trained(net)) before.push_back(parameter.detach().clone());
  const auto own = [](OptimizerState & state) -> auto& {
    return state.communication.of_ranks.front().second;
  };
  const std::vector<Change> changes = {
      [](OptimizerState& state) { state = {}; },
      [](OptimizerState& state) { state.communication.method += "!"; },
      [](OptimizerState& state) { ++state.communication.ranks; },
      [](OptimizerState& state) { ++state.communication.of_ranks.front().first; },
      [](OptimizerState& state) { state.communication.of_ranks.clear(); },
      [](OptimizerState& state) { state.communication.numbers.front().second = "one"; },
      [&](OptimizerState& state) { own(state).pop_back(); },
      [&](OptimizerState& state) { own(state).emplace_back("another", OptimizerState::Values{}); },
      [&](OptimizerState& state) { own(state).front().second.pop_back(); },
      [&](OptimizerState& state) { own(state).front().second.emplace_back("another", 1); },
      [&](OptimizerState& state) { own(state).front().second.front().second = torch::zeros({3}); },
      [&](OptimizerState& state) { own(state).front().second.front().second = 3; },
  };
  for (std::size_t i = 0; i < changes.size(); ++i) {
    OptimizerState wrong = right;
    if (rank() == size() - 1) changes[i](wrong);
    EXPECT_THROW(updates.load_state(wrong), ConfigError) << i;
  }
  if (size() > 1) {
    OptimizerState of_another_step = right, of_another_run = right;
    if (rank() == 0) {
      of_another_step.communication.numbers.front().second = std::int64_t{2};
      for (auto& [key, value] : own(of_another_run).front().second) {
        if (key == "start") value = value.toTensor() + 1;
      }
    }
    EXPECT_THROW(updates.load_state(of_another_step), ConfigError);
    EXPECT_THROW(updates.load_state(of_another_run), ConfigError);
  }
  EXPECT_EQ(updates.local_step(), 5);
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(trained(net)[i], before[i])) << i;
  updates.load_state(right);
}

// A program that loads a module begins a round with that, and the outer optimizer's momentum stays.
TEST(LocalUpdates, WhatIsLoadedBeginsARound) {
  Net net(7), other(21);
  Shard sharded = shard(*net, group());
  const Optimizer optimizer = kInner[0].make(sharded.parameters());
  LocalUpdates updates(sharded, {.local_steps = 3, .parts = 2, .overlap_steps = 1});
  for (int number = 0; number < 4; ++number) step(net, *optimizer, updates, number);
  Shard source = shard(*other, group());
  sharded.load_state_dict({source.full_state_dict()});
  EXPECT_EQ(updates.local_step(), 0);
  updates.finish();  // nothing has been stepped
  expect_same(*net, *other, "loaded");
}

// What has been applied in all rounds, and what ranks hold back, are together what all ranks had; of gTop-k
// as it was published they are not.
TEST(LocalUpdates, NothingIsLostOfWhatIsCompressed) {
  for (const Compression compression : {Compression::kBFloat16, Compression::kTopK, Compression::kGTopK,
                                        Compression::kGTopKTree, Compression::kOkTopK, Compression::kDgc}) {
    torch::nn::Linear layer(torch::nn::LinearOptions(256, 4 * size()).bias(false));
    Shard sharded = shard(*layer, group());
    LocalUpdatesOptions options{
        .local_steps = 1, .outer_lr = 1, .outer_momentum = 0, .compression = compression};
    if (compression != Compression::kBFloat16) options.compression_options.density = 0.02;
    if (has_momentum(compression)) options.compression_options.momentum = 0;  // what is applied is what was
    LocalUpdates updates(sharded, options);
    const torch::NoGradGuard no_grad;
    Tensor weight = layer->weight;
    Tensor had = torch::zeros({weight.numel()}, torch::kDouble), applied = had.clone();
    torch::manual_seed(11);
    const Tensor scale =
        torch::randn_like(weight).mul(2).exp2();  // ranks' largest elements are often the same
    for (int round = 0; round < 6; ++round) {
      const Tensor start = weight.clone();
      torch::manual_seed(static_cast<std::uint64_t>(100 * round + rank()));
      weight.add_(torch::randn_like(weight) * scale, 0.1);
      had += (start - weight).reshape({-1}).to(torch::kDouble);
      updates.step();
      applied += (start - weight).reshape({-1}).to(torch::kDouble);
    }
    const OptimizerState state = updates.state();
    for (const auto& [name, values] : state.communication.of_ranks.front().second) {
      for (const auto& [key, value] : values) {
        if (key == "residual") applied += value.toTensor().to(torch::kDouble);
        if (key != "residual_of_sum") continue;  // of this rank's slice of the sum
        const std::int64_t slice = weight.numel() / size();
        applied.narrow(0, rank() * slice, slice) += value.toTensor().to(torch::kDouble);
      }
    }
    all_reduce({had, applied}, group());
    const double lost = (had - applied).abs().max().item<double>() / had.abs().max().item<double>();
    const bool loses = compression == Compression::kGTopKTree && size() > 2;
    EXPECT_EQ(lost < 1e-5, !loses) << name_of(compression) << " has lost " << lost;
  }
}

}  // namespace
}  // namespace reef::shard_tests
