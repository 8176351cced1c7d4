// Run as several ranks by tests/support/ranks.py.
#include "reef/measure_pipeline.h"

#include <string>
#include <vector>

#include "pipelines.h"
#include "reef/plan_pipeline.h"

namespace reef {
namespace {

using namespace pipeline_tests;

torch::nn::Sequential net() {
  torch::manual_seed(7);
  torch::nn::Sequential modules;
  modules->push_back(torch::nn::Linear(4, 6));
  modules->push_back(torch::nn::Tanh());
  modules->push_back(torch::nn::BatchNorm1d(6));
  modules->push_back(torch::nn::Dropout(0.5));
  modules->push_back(torch::nn::Linear(6, 6));
  modules->push_back(torch::nn::Linear(6, 3));
  for (Tensor& parameter : modules[5]->parameters()) parameter.set_requires_grad(false);
  return modules;
}

constexpr std::uint64_t kRows = 5, kFloat = 4;

TEST(MeasurePipeline, BytesAreThoseThatStagesKeep) {
  torch::nn::Sequential modules = net();
  MeasurePipelineOptions options{.repeats = 2, .state_bytes_per_byte = 2};
  if (rank() == 0) options.rank_bytes = 1 << 20;
  const Tensor input = rank() == 0 ? torch::randn({kRows, 4}) : Tensor();
  const PipelineProfile profile = measure_pipeline(modules, input, world(), options);
  ASSERT_EQ(profile.stages.size(), 6U);
  const std::vector<std::uint64_t> outputs = {6, 6, 6, 6, 6, 3};
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(profile.stages[i].output_bytes, kRows * outputs[i] * kFloat) << i;
    EXPECT_GT(profile.stages[i].forward_seconds, 0) << i;
  }
  // A Linear keeps its input for the weight's gradient, and from I on its output's gradient, too.
  EXPECT_EQ(profile.stages[4].kept_bytes, kRows * 6 * kFloat);
  EXPECT_EQ(profile.stages[4].kept_after_input_bytes, kRows * (6 + 6) * kFloat);
  EXPECT_EQ(profile.stages[4].fixed_bytes, (36 + 6) * kFloat * 4);  // itself, its gradient, and two states
  // Tanh keeps its output until I.
  EXPECT_EQ(profile.stages[1].kept_bytes, kRows * 6 * kFloat);
  EXPECT_EQ(profile.stages[1].kept_after_input_bytes, 0U);
  // What is frozen has no gradient and no states, and keeps nothing.
  EXPECT_EQ(profile.stages[5].fixed_bytes, (18 + 3) * kFloat);
  EXPECT_EQ(profile.stages[5].kept_bytes, 0U);
  EXPECT_EQ(profile.stages[2].fixed_bytes, 12 * kFloat * 4 + 12 * kFloat + 8);  // and its running statistics
  // The same on all ranks, to the last bit.
  std::vector<double> numbers;
  for (const PipelineChunkCost& stage : profile.stages) {
    numbers.insert(numbers.end(),
                   {stage.forward_seconds, stage.input_seconds, stage.weight_seconds,
                    static_cast<double>(stage.kept_bytes), static_cast<double>(stage.working_bytes)});
  }
  for (const Link& link : profile.links)
    numbers.insert(numbers.end(), {link.latency_seconds, link.bytes_per_second});
  numbers.insert(numbers.end(), profile.speeds.begin(), profile.speeds.end());
  const Tensor own = torch::tensor(numbers, at::kDouble), of_first = own.clone();
  broadcast({of_first}, world());
  EXPECT_TRUE(same(own, of_first));
  const auto ranks = static_cast<std::size_t>(size());
  EXPECT_EQ(profile.links.size(), ranks == 1 ? 0 : ranks == 2 ? 1 : ranks * ranks);
  ASSERT_EQ(profile.rank_bytes.size(), ranks);
  EXPECT_EQ(profile.rank_bytes.front(), 1U << 20);
}

TEST(MeasurePipeline, NothingIsTrainedAndThePlanRuns) {
  torch::nn::Sequential modules = net();
  for (Tensor& parameter : modules->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  const torch::nn::Sequential before = net();
  torch::manual_seed(50 + static_cast<std::uint64_t>(rank()));
  const Tensor expected = torch::rand({3});
  torch::manual_seed(50 + static_cast<std::uint64_t>(rank()));
  const PipelineProfile profile =
      measure_pipeline(modules, torch::ones({kRows, 4}), world(), {.repeats = 1, .each_link = false});
  EXPECT_TRUE(same(torch::rand({3}), expected));
  const auto expected_parameters = before->named_parameters();
  for (const auto& each : modules->named_parameters()) {
    EXPECT_TRUE(same(each.value(), expected_parameters[each.key()])) << each.key();
    EXPECT_TRUE(same(each.value().grad(), torch::ones_like(each.value()))) << each.key();
  }
  const auto expected_buffers = before->named_buffers();
  for (const auto& each : modules->named_buffers())
    EXPECT_TRUE(same(each.value(), expected_buffers[each.key()])) << each.key();
  modules->zero_grad();
  const PipelinePlan plan = plan_pipeline(profile, static_cast<std::uint32_t>(size()), {.micro_batches = 3});
  PipelineOptions options;
  options.actions = plan.schedule;
  options.cuts = plan.cuts;
  Pipeline pipeline(modules, world(), options);
  EXPECT_TRUE(pipeline.step(torch::ones({6, 4}), loss_of).defined());
}

TEST(MeasurePipeline, APipelineMeasuresAndPlansByItself) {
  torch::nn::Sequential one = net(), other = net();
  const Tensor sample = rank() == 0 ? torch::ones({kRows, 4}) : Tensor();
  Pipeline planned(one, world(), {.micro_batches = 3, .sample = PipelineSample{{sample}, 1U << 30}});
  EXPECT_NE(planned.plan().find("3 micro-batches over " + std::to_string(size()) + " ranks"),
            std::string::npos)
      << planned.plan();
  Pipeline named(other, world(), {.micro_batches = 3, .schedule = "gpipe"});
  EXPECT_EQ(named.plan(), "");
  EXPECT_TRUE(same(planned.step(torch::ones({6, 4}), loss_of), named.step(torch::ones({6, 4}), loss_of)));
  std::string told;
  try {
    const Pipeline refused(one, world(), {.micro_batches = 3, .sample = PipelineSample{{sample}, 64}});
  } catch (const std::exception& error) {
    told = message_of(error);
  }
  expect_words(told, {"bytes are missing"});
  expect_words(config_error([&] {
                 const Pipeline refused(one, world(), {.sample = PipelineSample{{sample}}, .hops = {1}});
               }),
               {"leave out the one or the others"});
  expect_words(config_error([&] { const Pipeline refused(one, world(), {.sample = PipelineSample{}}); }),
               {"a sample of no tensors"});
}

TEST(MeasurePipeline, WhatFailsIsToldToAll) {
  std::vector<PipelineStage> stages(4);
  for (std::size_t i = 0; i < 4; ++i) {
    stages[i].run = [i](const Tensors& given) -> Tensors {
      if (i == 3) throw std::runtime_error("the last stage of this test");
      return given;
    };
  }
  std::string told;
  try {
    measure_pipeline(stages, {torch::ones({2, 2})}, world());
  } catch (const std::exception& error) {
    told = message_of(error);
  }
  expect_words(told, {"the last stage of this test"});
  expect_words(config_error([&] {
                 measure_pipeline(stages, {torch::ones({2, 2})}, world(), {.repeats = 0});
               }),
               {"0 repeats"});
  stages.resize(1);
  if (size() > 1)
    expect_words(config_error([&] {
                   measure_pipeline(stages, {torch::ones({2, 2})}, world());
                 }),
                 {"1 stages"});
}

}  // namespace
}  // namespace reef
