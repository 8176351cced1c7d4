// A network that changes between steps, or has a layer at several places.
#include "chain_nets.h"
#include "reef/chain.h"
#include "reef/error.h"

namespace reef {
namespace {

using namespace chain_tests;

Left now(const Net& net, std::int64_t budget_bytes) {
  return step(net, [&](const Tensor& x) { return checkpoint_sequential(net.layers, x, budget_bytes); });
}

/// As step(), of a network some of whose parameters get no gradient.
Tensors gradients(nn::Sequential layers, const Tensor& input,
                  const std::function<Tensor(const Tensor&)>& of) {
  layers.ptr()->zero_grad();
  torch::manual_seed(7);
  const Tensor output = of(input);
  output.pow(2).mean().backward();
  Tensors left{output.detach()};
  for (const Tensor& parameter : layers->parameters()) {
    left.push_back(parameter.grad().defined() ? parameter.grad().clone() : torch::zeros({0}));
  }
  layers.ptr()->zero_grad();
  return left;
}

TEST(ChainLayers, AfterEveryChangeTheNetworkAsItIsNowIsRun) {
  torch::manual_seed(0);
  nn::Sequential layers;
  for (int i = 0; i < 6; ++i) layers->push_back(Block(32, 0.2));
  const Tensor x = torch::randn({64, 32});
  struct Row {
    const char* name;
    std::function<void()> change;
  };
  const auto train = [&](std::size_t index, bool trains) {
    for (Tensor& parameter : layers[index]->parameters()) parameter.requires_grad_(trains);
  };
  const Row rows[] = {{"as it was", [] {}},
                      {"frozen",
                       [&] {
                         for (std::size_t i = 0; i < 4; ++i) train(i, false);
                       }},
                      {"one unfrozen", [&] { train(1, true); }},
                      {"unfrozen",
                       [&] {
                         for (std::size_t i = 0; i < 4; ++i) train(i, true);
                       }},
                      {"appended", [&] { layers->push_back(Block(32, 0.0)); }},
                      {"the first once more", [&] { layers->push_back(layers->ptr<BlockImpl>(0)); }},
                      {"evaluating", [&] { layers->eval(); }},
                      {"one training", [&] { layers[0]->train(); }},
                      {"training", [&] { layers->train(); }},
                      {"a parameter within replaced", [&] {
                         auto linear = layers->ptr<BlockImpl>(2)->up;
                         linear->weight.set_data(torch::randn_like(linear->weight));
                       }}};
  for (const Row& row : rows) {
    row.change();
    const Tensors plain = gradients(layers, x, [&](const Tensor& in) { return layers->forward(in); });
    Chain chain(layers);
    EXPECT_EQ(chain.size(), layers->size()) << row.name;
    const ChainProfile profile = profile_chain(chain, x, {.repeats = 1});
    const auto budget_bytes = static_cast<std::int64_t>(
        (minimum_bytes(profile) + natural_peak_bytes(profile)) / 2);  // as it was would need another number
    const Tensors ours = gradients(
        layers, x, [&](const Tensor& in) { return checkpoint_sequential(layers, in, budget_bytes); });
    ASSERT_EQ(ours.size(), plain.size()) << row.name;
    for (std::size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(ours[i].equal(plain[i])) << row.name << i;
    EXPECT_EQ(natural_peak_bytes(plan_of(layers, x, budget_bytes).profile), natural_peak_bytes(profile))
        << row.name;
  }
}

TEST(ChainLayers, AModuleAtSeveralPlacesRunsAtEachAndItsGradientIsCountedOnce) {
  torch::manual_seed(0);
  nn::Sequential layers;
  const auto block = std::make_shared<BlockImpl>(32, 0.2);
  for (int i = 0; i < 5; ++i) layers->push_back(block);
  Net net{"one block", layers, torch::randn({64, 32}, torch::requires_grad())};
  const Left plain = plain_step(net);
  Chain chain(layers);
  ASSERT_EQ(chain.size(), 5U);
  const ChainProfile profile = profile_chain(chain, net.input, {.repeats = 1});
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(profile.stages[i].gradient_bytes, 0U) << i;
  EXPECT_GT(profile.stages[4].gradient_bytes, 0U);
  expect_equal(now(net, static_cast<std::int64_t>(minimum_bytes(profile))), plain, net.name);
}

TEST(ChainLayers, AChainOfASequentialThatHasGrownIsRefused) {
  nn::Sequential layers(nn::Linear(4, 4), nn::Tanh());
  const Tensor x = torch::randn({2, 4}, torch::requires_grad());
  Chain chain(layers);
  const Schedule schedule = plan_chain(profile_chain(chain, x), 1 << 20);
  PlannedChain planned(chain);
  planned(x, 1 << 20);
  layers->push_back(nn::Linear(4, 4));
  EXPECT_THROW(run(chain, schedule, x), ConfigError);
  EXPECT_THROW(profile_chain(chain, x), ConfigError);
  EXPECT_THROW(chain(x), ConfigError);
  EXPECT_THROW(planned(x, 1 << 20), ConfigError);
  EXPECT_TRUE(planned(Chain(layers), x, 1 << 20).equal(layers->forward(x)));
}

TEST(ChainLayers, PartsAreFoundAgain) {
  const auto chain = [] {
    return Chain({[](const Tensor& x) { return x * 2; }, [](Tensor x) { return x.relu_(); },
                  [](const Tensor& x) { return x.exp(); }});
  };
  Chain profiled = chain(), other = chain();
  profile_chain(profiled, torch::randn({4}, torch::requires_grad()));
  EXPECT_EQ(profiled.parts(), (std::vector<std::size_t>{2, 1}));
  other.join_to(profiled.parts());
  EXPECT_EQ(other.name(0), "0 1");
  EXPECT_THROW(other.join_to({1, 1}), ConfigError);
}

}  // namespace
}  // namespace reef
