// Inputs of another size at nearly every step.
#include "chain_nets.h"
#include "reef/chain.h"
#include "reef/error.h"

namespace reef {
namespace {

using namespace chain_tests;

TEST(ChainSizes, EveryStepIsThePlainOneWithinItsBytesAndFewAreProfiled) {
  torch::manual_seed(0);
  int calls = 0;
  std::vector<Chain::Stage> stages;
  nn::Sequential layers;
  for (int i = 0; i < 5; ++i) {
    layers->push_back(Block(32, 0.1));
    stages.emplace_back(
        [&calls, block = layers->ptr<BlockImpl>(static_cast<std::size_t>(i))](const Tensor& x) {
          ++calls;
          const Tensor y = block->forward(x);
          return y + y.matmul(y.transpose(-1, -2)).softmax(-1).matmul(y);  // the square of the length
        });
  }
  const auto sized = [](std::int64_t length) { return torch::randn({2, length, 32}); };
  Chain plain(stages), longest(stages);
  const ChainProfile profile = profile_chain(longest, sized(120), {.repeats = 1});
  const auto budget_bytes =
      static_cast<std::int64_t>((minimum_bytes(profile) + natural_peak_bytes(profile)) / 2);
  PlannedChain planned{Chain(stages)};
  int all_calls = 0, priced = 0;
  for (std::int64_t i = 0; i < 24; ++i) {
    Net net{"step", layers, sized(40 + i * 29 % 81)};
    const Left wanted = step(net, [&](const Tensor& x) { return plain(x); });
    net.layers->zero_grad();
    calls = 0;
    const Left ours = step(net, [&](const Tensor& x) { return planned(x, budget_bytes); });
    all_calls += calls;
    expect_equal(ours, wanted, std::to_string(i));
    EXPECT_LE(static_cast<double>(ours.peak_bytes), 1.02 * static_cast<double>(budget_bytes) +
                                                        6.0 * static_cast<double>(net.input.nbytes()) + 1024);
    net.layers->zero_grad();
    priced += planned.plan(net.input, budget_bytes).is_priced ? 1 : 0;
  }
  EXPECT_GE(priced, 16);
  EXPECT_LT(all_calls, 24 * 5 * 5);  // where each profile is 12 forward passes
  PlannedChain profiled(Chain(stages), {.price_sizes = false});
  for (const std::int64_t length : {60, 62}) EXPECT_FALSE(profiled.plan(sized(length), 1 << 30).is_priced);
}

TEST(ChainSizes, WhatNeedsMoreThanPricedIsProfiledFromThenOn) {
  const Tensor weight = torch::ones({8}, torch::requires_grad());
  const auto steep = [weight](const Tensor& x) {
    const std::int64_t n = x.size(1);
    return x * weight + (x.sum() * torch::ones({n, n, n, n / 10})).sin().mean();
  };
  PlannedChain planned(Chain(std::vector<Chain::Stage>(3, steep)));
  const auto sized = [](std::int64_t length) { return torch::ones({1, length, 8}); };
  Chain first(std::vector<Chain::Stage>(3, steep));
  const auto budget_bytes = static_cast<std::int64_t>(
      1.28 * static_cast<double>(natural_peak_bytes(profile_chain(first, sized(40)))));
  const auto run = [&](std::int64_t length) {
    weight.mutable_grad() = Tensor();
    planned(sized(length), budget_bytes).sum().backward();
    weight.mutable_grad() = Tensor();
  };
  run(40);
  EXPECT_TRUE(planned.plan(sized(45), budget_bytes).is_priced);
  run(45);
  EXPECT_FALSE(planned.plan(sized(45), budget_bytes).is_priced);
  EXPECT_FALSE(planned.plan(sized(44), budget_bytes).is_priced);
}

}  // namespace
}  // namespace reef
