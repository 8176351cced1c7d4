#include "reef/gradient_release.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <optional>

#include "optim/train_within.h"
#include "reef/error.h"
#include "reef/ledger.h"

namespace reef::optim {
namespace {

using at::Tensor;

struct Net {
  torch::nn::Linear first{24, 40};
  torch::nn::Linear second{40, 40};
  torch::nn::Linear seldom{24, 40};  ///< has a gradient in some passes only
  torch::nn::Linear frozen{40, 40};
  Net() {
    for (Tensor& p : frozen->parameters()) p.requires_grad_(false);
  }
  std::vector<Tensor> parameters() const {
    std::vector<Tensor> all;
    for (const auto& layer : {first, second, seldom, frozen}) {
      for (const Tensor& p : layer->parameters()) all.push_back(p);
    }
    return all;
  }
  // `second` is used twice.
  Tensor loss(int pass) {
    Tensor x = torch::full({8, 24}, 0.1 * (pass + 1));
    Tensor y = first->forward(x);
    if (pass % 4 == 1) y = y + seldom->forward(x);
    return second->forward(torch::tanh(frozen->forward(second->forward(y)))).pow(2).mean();
  }
};

using Make = std::function<std::unique_ptr<Optimizer>(const std::vector<torch::optim::OptimizerParamGroup>&)>;
template <class RuleOptions>
Make with(const RuleOptions& options) {
  return [options](const auto& groups) { return std::make_unique<Rule<RuleOptions>>(groups, options); };
}

std::unique_ptr<Optimizer> in_two_groups(const Make& make, const Net& net) {
  const std::vector<Tensor> all = net.parameters();
  return make({torch::optim::OptimizerParamGroup({all.begin(), all.begin() + 3}),
               torch::optim::OptimizerParamGroup({all.begin() + 3, all.end()})});
}

bool no_gradients(const std::vector<Tensor>& all) {
  return std::none_of(all.begin(), all.end(), [](const Tensor& p) { return p.grad().defined(); });
}

TEST(GradientRelease, TakesTheSameSteps) {
  const Make makes[] = {
      with(AdamWOptions(1e-2)),
      with(AdamWOptions(1e-2).state(StateFormat::kInt8).min_quantized_numel(100)),
      with(AdamWOptions(1e-2).state(StateFormat::kBFloat16).min_quantized_numel(0)),
      with(SGDOptions(0.1).momentum(0.9).nesterov(true)),
      with(LAMBOptions(1e-2).weight_decay(0.01)),
      with(LARSOptions(1.0)),
  };
  for (const Make& make : makes) {
    for (const int accumulate : {1, 3}) {
      const auto train = [&](bool released) {
        torch::manual_seed(0);
        Net net;
        const auto optimizer = in_two_groups(make, net);
        std::optional<GradientRelease> release;
        if (released) release.emplace(*optimizer, accumulate);
        for (int step = 0; step < 4; ++step) {
          for (int pass = 0; pass < accumulate; ++pass) net.loss(step * accumulate + pass).backward();
          optimizer->step();
          if (released) {
            EXPECT_TRUE(no_gradients(net.parameters()));
          }
          optimizer->zero_grad();
        }
        return net.parameters();
      };
      const std::vector<Tensor> plain = train(false);
      const std::vector<Tensor> released = train(true);
      for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(torch::equal(plain[i], released[i])) << i;
    }
  }
}

TEST(GradientRelease, FewGradientsAreThereAtATime) {
  constexpr std::int64_t kWidth = 64;
  constexpr std::int64_t kLayerBytes = kWidth * (kWidth + 1) * 4;
  const auto peak = [&](bool released) {
    torch::nn::Sequential net;
    for (int i = 0; i < 10; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
    AdamW optimizer(net->parameters());
    std::optional<GradientRelease> release;
    if (released) release.emplace(optimizer);
    Ledger ledger;
    ledger.watch(*net);
    for (int step = 0; step < 3; ++step) {
      net->forward(torch::ones({4, kWidth})).pow(2).mean().backward();
      EXPECT_EQ(no_gradients(net->parameters()), released);
      optimizer.step();
      optimizer.zero_grad();
    }
    return ledger.peak_by_category()[Category::kGradient];
  };
  EXPECT_EQ(peak(false), 10 * kLayerBytes);
  EXPECT_LE(peak(true), kLayerBytes);
}

TEST(GradientRelease, GradientsOfSeveralPassesAreKeptUntilTheLast) {
  Net net;
  AdamW optimizer(net.first->parameters());
  const GradientRelease release(optimizer, 2);
  const Tensor before = net.first->weight.detach().clone();
  net.loss(0).backward();
  EXPECT_TRUE(net.first->weight.grad().defined());
  EXPECT_TRUE(torch::equal(net.first->weight, before));
  net.loss(2).backward();
  EXPECT_FALSE(net.first->weight.grad().defined());
  EXPECT_FALSE(torch::equal(net.first->weight, before));
}

TEST(GradientRelease, APassTooManyIsRefusedAndTheNextStepTakesIt) {
  Net net;
  AdamW optimizer(net.parameters());
  const GradientRelease release(optimizer);
  net.loss(0).backward();
  try {
    net.loss(0).backward();
    FAIL() << "nothing was thrown";
  } catch (const ConfigError& error) {
    EXPECT_NE(message_of(error).find("has been stepped after 1 backward passes"), std::string::npos);
  }
  optimizer.step();
  EXPECT_TRUE(no_gradients(net.parameters()));
  net.loss(0).backward();
  EXPECT_TRUE(no_gradients(net.parameters()));
}

TEST(GradientRelease, StepReportsWhatWasNotFinite) {
  Net net;
  AdamW optimizer(net.parameters());
  const GradientRelease release(optimizer);
  const Tensor before = net.second->bias.detach().clone();
  (net.loss(0) * std::numeric_limits<float>::infinity()).backward();
  try {
    optimizer.step();
    FAIL() << "nothing was thrown";
  } catch (const NonFiniteGradient& error) {
    EXPECT_NE(message_of(error).find("parameter 0 of group 0, of shape [40, 24]"), std::string::npos);
  }
  EXPECT_TRUE(torch::equal(net.second->bias, before));
  net.loss(0).backward();
  EXPECT_NO_THROW(optimizer.step());
}

struct Counting final : torch::autograd::PostAccumulateGradHook {
  explicit Counting(int& counted) : calls(counted) {}
  void operator()(const Tensor& parameter) override { calls += parameter.grad().defined() ? 1 : 0; }
  int& calls;
};

TEST(GradientRelease, HooksOfOthersGoOn) {
  Net net;
  AdamW optimizer(net.parameters());
  int calls = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(net.first->weight, std::make_unique<Counting>(calls));
  {
    const GradientRelease release(optimizer);
    net.loss(0).backward();
    EXPECT_EQ(calls, 1);
    EXPECT_FALSE(net.first->weight.grad().defined());
    // Another takes the place of ours.
    torch::autograd::impl::set_post_acc_grad_hooks(net.first->bias, std::make_unique<Counting>(calls));
  }
  net.loss(0).backward();
  EXPECT_EQ(calls, 3);
  EXPECT_TRUE(net.first->weight.grad().defined());
}

TEST(GradientRelease, WithinABudgetBitForBit) {
  const auto plain = train_within(StateFormat::kInt8, 0);
  const auto released = train_within(StateFormat::kInt8, kTrainedElements, /*release_gradients=*/true);
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(torch::equal(plain[i], released[i])) << i;
}

TEST(GradientRelease, RefusesWhatCannotBe) {
  Net net;
  AdamW optimizer(net.parameters());
  EXPECT_THROW(GradientRelease(optimizer, 0), ConfigError);
  {
    const GradientRelease release(optimizer);
    EXPECT_THROW(GradientRelease(optimizer, 1), ConfigError);
  }
  const GradientRelease again(optimizer, 1);
}

}  // namespace
}  // namespace reef::optim
