#include "reef/optim.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <sstream>

#include "optim/train_within.h"
#include "reef/build_info.h"
#include "reef/error.h"

namespace reef::optim {
namespace {

using torch::Tensor;
using torch::optim::OptimizerParamGroup;

std::vector<Tensor> parameters(c10::ScalarType dtype = torch::kFloat) {
  torch::manual_seed(0);
  std::vector<Tensor> made;
  for (const std::vector<std::int64_t>& shape :
       std::vector<std::vector<std::int64_t>>{{65, 96}, {17}, {5000}, {3, 5, 31}}) {
    made.push_back(torch::randn(shape).to(dtype).requires_grad_());
  }
  return made;
}

void give_gradients(std::vector<Tensor>& all, int step) {
  torch::manual_seed(1000 + static_cast<std::uint64_t>(step));
  for (Tensor& p : all)
    p.mutable_grad() = (torch::randn(p.sizes()) * std::pow(10, -(step % 3))).to(p.dtype());
}

void run(torch::optim::Optimizer& optimizer, std::vector<Tensor>& all, int steps, int first = 0) {
  for (int step = first; step < first + steps; ++step) {
    give_gradients(all, step);
    optimizer.step();
  }
}

void expect_equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << "parameter " << i;
}

struct Case {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(std::vector<Tensor>, StateFormat, MasterWeights)> make;
};

template <class RuleOptions>
Case make_case(std::string name, const RuleOptions& options) {
  return {std::move(name), [options](std::vector<Tensor> all, StateFormat format, MasterWeights master) {
            return std::make_unique<Rule<RuleOptions>>(
                std::move(all), RuleOptions(options).state(format).master(master).min_quantized_numel(100));
          }};
}

std::vector<Case> cases() {
  return {make_case("AdamW", AdamWOptions(1e-2)),
          make_case("AdamAmsgrad", AdamOptions(1e-2).weight_decay(0.01).amsgrad(true)),
          make_case("SGD", SGDOptions(0.1).weight_decay(0.01)),
          make_case("SGDNesterov", SGDOptions(0.1).momentum(0.9).nesterov(true)),
          make_case("Lion", LionOptions(1e-3).weight_decay(0.1)),
          make_case("RMSprop", RMSpropOptions(1e-3).momentum(0.9).centered(true)),
          make_case("Adagrad", AdagradOptions(1e-2).lr_decay(0.01).initial_accumulator_value(0.1)),
          make_case("LAMB", LAMBOptions(1e-2).weight_decay(0.01)),
          make_case("LARS", LARSOptions(1.0).weight_decay(0.01))};
}

constexpr StateFormat kFormats[] = {StateFormat::kFloat32,
                                    StateFormat::kBFloat16,
                                    StateFormat::kInt8,
                                    StateFormat::kInt4,
                                    StateFormat::kCompanded8,
                                    StateFormat::kInt8Compensated,
                                    StateFormat::kInt4Compensated,
                                    StateFormat::kCompanded8Compensated,
                                    StateFormat::kInt4Rank1};

struct EveryRule : testing::TestWithParam<Case> {};

TEST_P(EveryRule, ResumesBitForBit) {
  for (const StateFormat format : kFormats) {
    for (const MasterWeights master :
         {MasterWeights::kNone, MasterWeights::kFloat32, MasterWeights::kSplit, MasterWeights::kStochastic}) {
      const auto dtype = master == MasterWeights::kNone ? torch::kFloat : torch::kBFloat16;
      std::vector<Tensor> straight = parameters(dtype);
      std::vector<Tensor> stopped = parameters(dtype);
      std::vector<Tensor> fresh = parameters(dtype);
      run(*GetParam().make(straight, format, master), straight, 6);
      const auto first = GetParam().make(stopped, format, master);
      run(*first, stopped, 3);
      std::stringstream file;
      torch::save(*first, file);
      const auto second = GetParam().make(fresh, StateFormat::kFloat32, MasterWeights::kNone);
      torch::load(*second, file);
      for (std::size_t i = 0; i < fresh.size(); ++i) fresh[i].data().copy_(stopped[i].data());
      run(*second, fresh, 3, 3);
      expect_equal(straight, fresh);
    }
  }
}

TEST_P(EveryRule, WhatIsNotFiniteIsNamedAndNeverStored) {
  std::vector<Tensor> all = parameters();
  const auto optimizer = GetParam().make(all, StateFormat::kInt8, MasterWeights::kNone);
  run(*optimizer, all, 2);
  give_gradients(all, 2);
  all[2].mutable_grad()[300] = NAN;
  const Tensor before = all[2].detach().clone();
  try {
    optimizer->step();
    FAIL() << "no error";
  } catch (const NonFiniteGradient& error) {
    EXPECT_NE(message_of(error).find("parameter 2 of group 0, of shape [5000] (1 elements)"),
              std::string::npos)
        << message_of(error);
  }
  EXPECT_TRUE(torch::equal(all[2].slice(0, 256, 512), before.slice(0, 256, 512)));
  EXPECT_FALSE(torch::equal(all[2].slice(0, 512), before.slice(0, 512)));
  run(*optimizer, all, 1, 3);
  for (const Tensor& p : all) EXPECT_TRUE(torch::isfinite(p).all().item<bool>());
}

TEST_P(EveryRule, GroupsInheritWhatTheyDoNotSet) {
  std::vector<Tensor> all = parameters();
  std::vector<Tensor> alone = parameters();
  const auto whole = GetParam().make({all[0]}, StateFormat::kInt8, MasterWeights::kNone);
  whole->add_param_group(OptimizerParamGroup({all[1], all[2], all[3]}));
  const auto expected = GetParam().make(alone, StateFormat::kInt8, MasterWeights::kNone);
  run(*whole, all, 3);
  run(*expected, alone, 3);
  expect_equal(all, alone);
}

std::string case_name(const testing::TestParamInfo<Case>& tested) { return tested.param.name; }
INSTANTIATE_TEST_SUITE_P(All, EveryRule, testing::ValuesIn(cases()), case_name);

template <class Theirs, class Ours>
void expect_close(Theirs theirs_options, Ours ours_options) {
  using TheirOptimizer = std::conditional_t<
      std::is_same_v<Theirs, torch::optim::AdamWOptions>, torch::optim::AdamW,
      std::conditional_t<
          std::is_same_v<Theirs, torch::optim::AdamOptions>, torch::optim::Adam,
          std::conditional_t<std::is_same_v<Theirs, torch::optim::SGDOptions>, torch::optim::SGD,
                             std::conditional_t<std::is_same_v<Theirs, torch::optim::RMSpropOptions>,
                                                torch::optim::RMSprop, torch::optim::Adagrad>>>>;
  std::vector<Tensor> expected = parameters();
  std::vector<Tensor> found = parameters();
  TheirOptimizer theirs(expected, theirs_options);
  Rule<Ours> ours(found, ours_options);
  run(theirs, expected, 10);
  run(ours, found, 10);
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(torch::allclose(found[i], expected[i], 1e-5, 1e-6)) << "parameter " << i;
  }
}

TEST(Optim, StepsAsLibTorchsClassesDo) {
  torch::ones(16).sqrt();  // MKL's first call, on one thread (docs/budget.md)
  expect_close(torch::optim::AdamWOptions(1e-2), AdamWOptions(1e-2));
  expect_close(torch::optim::AdamOptions(1e-2).weight_decay(0.1).amsgrad(true),
               AdamOptions(1e-2).weight_decay(0.1).amsgrad(true));
  expect_close(torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.01),
               SGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.01));
  expect_close(torch::optim::RMSpropOptions(1e-2).momentum(0.9).centered(true),
               RMSpropOptions(1e-2).momentum(0.9).centered(true));
  expect_close(torch::optim::AdagradOptions(1e-2).lr_decay(0.1), AdagradOptions(1e-2).lr_decay(0.1));
}

TEST(Optim, LibTorchsFilesLoadAndOursLoadThere) {
  std::vector<Tensor> straight = parameters();
  torch::optim::AdamW theirs(straight, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  run(theirs, straight, 3);
  std::stringstream file;
  torch::save(theirs, file);

  std::vector<Tensor> moved = parameters();
  for (std::size_t i = 0; i < moved.size(); ++i) moved[i].data().copy_(straight[i].data());
  AdamW ours(moved, AdamWOptions(9).state(StateFormat::kInt8));
  torch::load(ours, file);
  const auto& options = static_cast<const AdamWOptions&>(ours.param_groups()[0].options());
  EXPECT_EQ(options.lr(), 1e-2);
  EXPECT_EQ(options.weight_decay(), 0.1);
  EXPECT_EQ(options.state(), StateFormat::kInt8);
  run(theirs, straight, 3, 3);
  run(ours, moved, 3, 3);
  for (std::size_t i = 0; i < moved.size(); ++i)
    EXPECT_TRUE(torch::allclose(moved[i], straight[i], 1e-2, 5e-3)) << i;

  torch::serialize::OutputArchive out;
  ours.save_for_torch(out);
  std::stringstream back;
  out.save_to(back);
  std::vector<Tensor> again = parameters();
  torch::optim::AdamW third(again, torch::optim::AdamWOptions(9));
  torch::load(third, back);
  EXPECT_EQ(third.param_groups()[0].options().get_lr(), 1e-2);
  for (std::size_t i = 0; i < again.size(); ++i) again[i].data().copy_(moved[i].data());
  run(third, again, 1, 6);
  run(ours, moved, 1, 6);
  for (std::size_t i = 0; i < moved.size(); ++i)
    EXPECT_TRUE(torch::allclose(moved[i], again[i], 1e-5, 1e-6)) << i;
}

TEST(Optim, AFileOfAnotherShapeIsRefusedAndNothingChanges) {
  std::vector<Tensor> all = parameters();
  AdamW one(all);
  run(one, all, 2);
  std::stringstream file;
  torch::save(one, file);
  std::vector<Tensor> fewer = {all[0], all[1]};
  AdamW other(fewer, AdamWOptions(0.5));
  EXPECT_THROW(torch::load(other, file), ConfigError);
  EXPECT_EQ(other.param_groups()[0].options().get_lr(), 0.5);
}

// LibTorch 2.13 to 2.15 drop a foreign group's own options, 2.11 inherits nothing.
TEST(Optim, AGroupsOwnOptionsHoldAndOthersAreInherited) {
  std::vector<Tensor> all = parameters();
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(
      std::vector<Tensor>{all[0]},
      std::make_unique<AdamWOptions>(AdamWOptions().weight_decay(0.5).state(StateFormat::kInt4)));
  groups.emplace_back(std::vector<Tensor>{all[1]});
  AdamW optimizer(groups, AdamWOptions(0.123).eps(1e-6));
  optimizer.add_param_group(
      OptimizerParamGroup({all[2]}, std::make_unique<AdamWOptions>(AdamWOptions().lr(1e-3))));
  const auto options = [&](std::size_t g) {
    return static_cast<const AdamWOptions&>(optimizer.param_groups()[g].options());
  };
  EXPECT_EQ(options(0).lr(), 0.123);
  EXPECT_EQ(options(0).weight_decay(), 0.5);
  EXPECT_EQ(options(0).state(), StateFormat::kInt4);
  EXPECT_EQ(options(1).lr(), 0.123);
  EXPECT_EQ(options(1).weight_decay(), 1e-2);
  EXPECT_EQ(options(2).lr(), 1e-3);  // set, although it is the class's default
  EXPECT_EQ(options(2).eps(), 1e-6);
  optimizer.add_param_group(OptimizerParamGroup({all[3]}, std::make_unique<AdamWOptions>(0.5)));
  EXPECT_EQ(options(3).lr(), 0.5);  // given to the constructor
}

TEST(Optim, SchedulersAndClosures) {
  std::vector<Tensor> all = parameters();
  AdamW optimizer(all, AdamWOptions(1e-2));
  torch::optim::StepLR schedule(optimizer, 10, 0.5);
  for (int step = 0; step < 25; ++step) {
    run(optimizer, all, 1, step);
    schedule.step();
  }
  EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(), 0.0025);
  torch::optim::ReduceLROnPlateauScheduler plateau(optimizer, torch::optim::ReduceLROnPlateauScheduler::min,
                                                   0.1F, 2);
  for (int step = 0; step < 5; ++step) plateau.step(1.F);
  EXPECT_NEAR(optimizer.param_groups()[0].options().get_lr(), 0.00025, 1e-9);
  const auto closure = [&] {
    optimizer.zero_grad();
    Tensor loss = all[0].pow(2).sum();
    loss.backward();
    return loss;
  };
  const float before = closure().item<float>();
  EXPECT_EQ(optimizer.step(closure).item<float>(), before);
  EXPECT_LT(closure().item<float>(), before);
}

TEST(Optim, BadOptionsAreRefusedWithASentence) {
  const auto refused = [](const std::function<void()>& make, const std::string& text) {
    try {
      make();
      ADD_FAILURE() << "no error: " << text;
    } catch (const ConfigError& error) {
      EXPECT_NE(message_of(error).find(text), std::string::npos) << message_of(error);
    }
  };
  refused([] { AdamW(parameters(), AdamWOptions(-1)); }, "lr is -1");
  refused([] { AdamW(parameters(), AdamWOptions().betas({1, 0.9})); }, "a beta is 1");
  refused([] { SGD(parameters(), SGDOptions().nesterov(true)); }, "nesterov needs a momentum");
  refused([] { AdamWOptions().set("gold", 1.0); }, "no option 'gold'");
  refused(
      [] {
        std::vector<Tensor> all = {torch::zeros({4}, torch::kDouble).requires_grad_()};
        AdamW optimizer(all);
        all[0].mutable_grad() = torch::zeros({4}, torch::kDouble);
        optimizer.step();
      },
      "dtype Double");
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(8, 4).sparse(true));
  AdamW optimizer(table->parameters());
  table->forward(torch::tensor({1, 2})).sum().backward();
  refused([&] { optimizer.step(); }, "parameter 0 of group 0, of shape [8, 4] has a sparse gradient");
}

TEST(Optim, OnADeviceBitForBit) {
  if (build_info().built_cuda.empty()) GTEST_SKIP() << "Reef was built without CUDA";
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  for (const StateFormat format : {StateFormat::kFloat32, StateFormat::kBFloat16, StateFormat::kInt8,
                                   StateFormat::kInt4, StateFormat::kCompanded8}) {
    std::vector<Tensor> here = parameters();
    std::vector<Tensor> there;
    for (const Tensor& p : here) there.push_back(p.detach().to(torch::kCUDA).requires_grad_());
    const auto options = AdamWOptions(1e-2).state(format).min_quantized_numel(0);
    AdamW on_cpu(here, options);
    AdamW on_device(there, options);
    for (int step = 0; step < 3; ++step) {
      give_gradients(here, step);
      for (std::size_t i = 0; i < here.size(); ++i) there[i].mutable_grad() = here[i].grad().to(torch::kCUDA);
      on_cpu.step();
      on_device.step();
    }
    for (std::size_t i = 0; i < here.size(); ++i) EXPECT_TRUE(torch::equal(here[i], there[i].cpu()));
  }
}

TEST(Optim, WithinABudgetBitForBit) {
  for (const StateFormat format : {StateFormat::kFloat32, StateFormat::kInt8}) {
    expect_equal(train_within(format, 0), train_within(format, kTrainedElements * 2));
  }
}

}  // namespace
}  // namespace reef::optim
