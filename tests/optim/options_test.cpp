#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>

#include "reef/error.h"
#include "reef/gradient_release.h"
#include "reef/optim.h"

// Options that a program sets, changes between steps, or has wrong; and parameters that have changed.
namespace reef::optim {
namespace {

using torch::Tensor;
using torch::optim::OptimizerParamGroup;

std::vector<Tensor> parameters() {
  torch::manual_seed(0);
  return {torch::randn({64, 96}).requires_grad_(), torch::randn({8, 8}).requires_grad_()};
}

void give_gradients(std::vector<Tensor>& all, int step) {
  torch::manual_seed(1000 + static_cast<std::uint64_t>(step));
  for (Tensor& p : all) p.mutable_grad() = torch::randn(p.sizes()).to(p.dtype());
}

void is_refused(const std::function<void()>& run, const std::string& text) {
  try {
    run();
    ADD_FAILURE() << "no error: " << text;
  } catch (const ConfigError& error) {
    EXPECT_NE(message_of(error).find(text), std::string::npos) << message_of(error);
  }
}

template <class RuleOptions>
RuleOptions& options_of(torch::optim::Optimizer& optimizer, std::size_t group = 0) {
  return static_cast<RuleOptions&>(optimizer.param_groups()[group].options());
}

/// An optimizer of two groups, of which the second is about to be wrong.
struct TwoGroups {
  std::vector<Tensor> all = parameters();
  AdamW optimizer{{OptimizerParamGroup({all[0]}), OptimizerParamGroup({all[1]})},
                  AdamWOptions().state(StateFormat::kInt4).min_quantized_numel(0)};

  TwoGroups() {
    give_gradients(all, 0);
    optimizer.step();
    give_gradients(all, 1);
  }
  void is_refused_whole(const std::string& text) {
    const Tensor before = all[0].detach().clone();
    is_refused([&] { optimizer.step(); }, text);
    EXPECT_TRUE(torch::equal(all[0], before)) << text;
  }
};

TEST(OptimOptions, WhatAProgramChangesIsCheckedBeforeAnythingIsStepped) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<std::pair<std::function<void(AdamWOptions&)>, std::string>> changes = {
      {[&](AdamWOptions& o) { o.lr(nan); }, "lr is nan"},
      {[](AdamWOptions& o) { o.lr(-1); }, "lr is -1"},
      {[](AdamWOptions& o) { o.lr(std::numeric_limits<double>::infinity()); }, "lr is inf"},
      {[](AdamWOptions& o) { o.weight_decay(-1); }, "weight_decay is -1"},
      {[&](AdamWOptions& o) { o.eps(nan); }, "eps is nan"},
      {[](AdamWOptions& o) {
         o.betas({0.9, 1});
       },
       "a beta is 1"},
      {[](AdamWOptions& o) { o.min_quantized_numel(-1); }, "min_quantized_numel is -1"},
      {[](AdamWOptions& o) { o.amsgrad(true); }, "has no state max_exp_avg_sq"},
      {[](AdamWOptions& o) { o.state(StateFormat::kInt8); },
       "states in int4, master weights none, and is now"},
      {[](AdamWOptions& o) { o.master(MasterWeights::kSplit); }, "master weights split"}};
  for (const auto& [change, text] : changes) {
    TwoGroups two;
    change(options_of<AdamWOptions>(two.optimizer, 1));
    two.is_refused_whole(text);
  }
  is_refused([] { AdamWOptions().set("lr", "0.1"); }, "lr is a value of kind String");
  is_refused([] { AdamWOptions().set("betas", std::tuple<double>(0.9)); }, "betas are 1 values");
}

TEST(OptimOptions, ParametersThatHaveChangedAreRefusedWhole) {
  const std::vector<std::pair<std::function<void(Tensor&)>, std::string>> changes = {
      {[](Tensor& p) {
         p.mutable_grad().reset();
         p.set_data(p.to(torch::kHalf));
         p.mutable_grad() = torch::ones_like(p);
       },
       "dtype Float, on cpu, states in int4, master weights none, and is now shape [8, 8], strides [8, 1], "
       "dtype Half"},
      {[](Tensor& p) {
         p.mutable_grad().reset();
         p.set_data(p.detach().slice(0, 0, 1).clone());
         p.mutable_grad() = torch::ones_like(p);
       },
       "and is now shape [1, 8]"},
      {[](Tensor& p) { p.set_data(p.detach().t().contiguous().t()); },
       "and is now shape [8, 8], strides [1, 8]"},
      {[](Tensor& p) {
         p.mutable_grad() = torch::ones({1, 8});
       },
       "has a gradient of shape [1, 8]"},
      {[](Tensor& p) {
         p.mutable_grad() = torch::ones({8, 8}, torch::kDouble);
       },
       "of dtype Double"},
      {[](Tensor& p) {
         p.mutable_grad() = torch::ones({8, 8}).to_sparse();
       },
       "has a sparse gradient"}};
  for (const auto& [change, text] : changes) {
    TwoGroups two;
    change(two.all[1]);
    two.is_refused_whole(text);
  }
}

TEST(OptimOptions, GroupsAreRefusedWhenTheyAreGiven) {
  std::vector<Tensor> all = parameters();
  AdamW optimizer({all[0]});
  const auto add = [&](std::vector<Tensor> these, std::unique_ptr<torch::optim::OptimizerOptions> options) {
    optimizer.add_param_group(OptimizerParamGroup(std::move(these), std::move(options)));
  };
  is_refused([&] { add({all[0]}, std::make_unique<AdamWOptions>()); }, "is in the optimizer already");
  is_refused([&] { add({all[1], all[1]}, std::make_unique<AdamWOptions>()); }, "give each parameter once");
  is_refused([&] { add({all[1]}, std::make_unique<SGDOptions>()); }, "options of another class");
  is_refused([&] { add({all[1]}, std::make_unique<torch::optim::AdamWOptions>(1e-3)); },
             "options of another class");
  is_refused([&] { add({torch::zeros({3}, torch::kComplexFloat)}, std::make_unique<AdamWOptions>()); },
             "of dtype ComplexFloat");
  is_refused([&] { add({all[1]}, std::make_unique<AdamWOptions>(-1)); }, "lr is -1");
  EXPECT_EQ(optimizer.param_groups().size(), 1U);
  is_refused(
      [&] {
        AdamW({all[0], all[0]});
      },
      "parameter 1 of group 0, of shape [64, 96] is in the optimizer already");
}

// The rows of tests/python/test_optim_switches.py that are LibTorch's in C++, too.
template <class Theirs, class TheirOptions, class OurOptions>
void expect_switched_alike(const std::vector<std::function<void(TheirOptions&)>>& theirs,
                           const std::vector<std::function<void(OurOptions&)>>& ours) {
  std::vector<Tensor> expected = parameters();
  std::vector<Tensor> found = parameters();
  Theirs a(expected, TheirOptions(0.1));
  Rule<OurOptions> b(found, OurOptions(0.1));
  for (std::size_t row = 0; row < ours.size(); ++row) {
    theirs[row](static_cast<TheirOptions&>(a.param_groups()[0].options()));
    ours[row](options_of<OurOptions>(b));
    for (int step = 0; step < 2; ++step) {
      give_gradients(expected, static_cast<int>(row) * 2 + step);
      give_gradients(found, static_cast<int>(row) * 2 + step);
      a.step();
      b.step();
    }
    for (std::size_t i = 0; i < found.size(); ++i)
      EXPECT_TRUE(torch::allclose(found[i], expected[i], 1e-5, 1e-6)) << "row " << row << ", parameter " << i;
  }
}

TEST(OptimOptions, SwitchedBetweenStepsAsLibTorchDoes) {
  const auto momentum = [](auto& o) { o.momentum(0.5).dampening(0.3); };
  const auto more = [](auto& o) { o.momentum(0.9).dampening(0); };
  const auto nesterov = [](auto& o) { o.nesterov(true).weight_decay(0.01); };
  const auto off = [](auto& o) { o.momentum(0); };
  const auto nothing = [](auto&) {};
  expect_switched_alike<torch::optim::SGD, torch::optim::SGDOptions, SGDOptions>(
      {nothing, momentum, more, nesterov, off, more}, {nothing, momentum, more, nesterov, off, more});
  const auto decay = [](auto& o) { o.weight_decay(0.1); };
  const auto betas = [](auto& o) { o.betas({0.5, 0.9}); };
  expect_switched_alike<torch::optim::Adam, torch::optim::AdamOptions, AdamOptions>({nothing, decay, betas},
                                                                                    {nothing, decay, betas});
}

TEST(OptimOptions, AMomentumThatBeganLateBeginsWithItsGradient) {
  for (const StateFormat format : {StateFormat::kFloat32, StateFormat::kInt8}) {
    Tensor p = torch::ones({5000}).requires_grad_();
    SGD optimizer({p}, SGDOptions(0.1).state(format));
    for (const double momentum : {0.0, 0.5, 0.9}) {
      options_of<SGDOptions>(optimizer).momentum(momentum).dampening(0.5);
      p.mutable_grad() = torch::ones_like(p);
      optimizer.step();
    }
    EXPECT_TRUE(torch::allclose(p, torch::full_like(p, 1 - 0.1 - 0.1 - 0.1 * (0.9 + 0.5)))) << p[0];
  }
}

TEST(OptimOptions, GradientReleaseRefusesTheSame) {
  Tensor p = torch::ones({8}).requires_grad_();
  AdamW optimizer({p});
  const GradientRelease release(optimizer);
  options_of<AdamWOptions>(optimizer).lr(-1);
  EXPECT_THROW((p * 2).sum().backward(), c10::Error);
  EXPECT_TRUE(torch::equal(p, torch::ones({8})));
  options_of<AdamWOptions>(optimizer).lr(0.1);
  optimizer.zero_grad();
  (p * 2).sum().backward();  // no pass too many
  EXPECT_FALSE(torch::equal(p, torch::ones({8})));
  optimizer.step();
}

}  // namespace
}  // namespace reef::optim
