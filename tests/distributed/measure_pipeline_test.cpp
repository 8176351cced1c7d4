// Run as several ranks by tests/support/ranks.py.
#include "reef/measure_pipeline.h"

#include <torch/optim/sgd.h>

#include <string>
#include <tuple>
#include <vector>

#include "pipelines.h"
#include "reef/ledger.h"
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

/// Six stages whose weights and activations are large. Messages are small, as it depends on time how many of
/// them wait, and so are states of generators, which a recomputed run keeps.
std::vector<Pipeline::Maker> large_stages() {
  std::vector<Pipeline::Maker> makers;
  for (std::uint64_t number = 0; number < 6; ++number) {
    makers.emplace_back([number] {
      torch::manual_seed(number);
      torch::nn::Sequential layers(torch::nn::Linear(16, 4096), torch::nn::Tanh(),
                                   torch::nn::Linear(4096, 16));
      PipelineStage stage;
      for (const auto& each : layers->named_parameters())
        stage.parameters.emplace_back(std::to_string(number) + "." + each.key(), each.value());
      stage.run = [layers](const Tensors& inputs) mutable -> Tensors {
        return {layers->forward(inputs.front())};
      };
      return stage;
    });
  }
  return makers;
}

// With weights, gradients, and where ranks have the same chunk the sums of each.
TEST(MeasurePipeline, AStepNeedsNoMoreThanIsPredicted) {
  const auto ranks = static_cast<std::uint32_t>(size());
  std::vector<ReplicasRow> rows = {{"1f1b"}, {"zero_bubble"}, {"gpipe"}};
  for (ReplicasRow& row : rows_of_ranks_per_chunk(ranks, 1)) rows.push_back(std::move(row));
  if (ranks % 2 == 0) rows.push_back({"chimera"});
  if (ranks > 1) rows.push_back({"1f1b", ranks});
  const std::vector<Tensor> sample = {torch::ones({64, 16})};
  const std::vector<RecomputedRuns> all_runs = {
      {}, {{0, 6}}, {{0, 6}, {0, 3}, {0, 2}, {1, 2}, {3, 5}, {4, 5}}};
  for (std::size_t i = 0; i < all_runs.size() * rows.size(); ++i) {
    const ReplicasRow& row = rows[i % rows.size()];
    const RecomputedRuns& runs = all_runs[i / rows.size()];
    const std::string where = text_of(row, Stage::kReplicate) + ", runs " + std::to_string(runs.size());
    PipelineProfile profile = measure_pipeline(large_stages(), sample, world(),
                                               {.repeats = 1, .state_bytes_per_byte = 0, .each_link = false});
    if (row.replicas > 1) {
      for (PipelineChunkCost& stage : profile.stages) stage.fixed_bytes += stage.gradient_bytes;
    }
    const Tensor batch = torch::ones({64 * 4, 16});
    Ledger ledger;
    PipelineOptions options = pipeline_tests::options_of(row, Stage::kReplicate, 4, 1 << 20);
    options.recomputed = runs;
    Pipeline pipeline(large_stages(), world(), options);
    const auto step = [&] { pipeline.step(batch, loss_of); };
    step();
    for (Tensor& parameter : pipeline.parameters()) parameter.mutable_grad().reset();
    ledger.reset_peak();
    step();
    const auto own = static_cast<std::uint32_t>(rank()) / row.replicas;
    if (row.replicas > 1) profile.speeds.clear();
    const auto predicted = static_cast<double>(
        simulate(cut_costs(profile, pipeline.cuts(), runs), pipeline.schedule()).ranks[own].peak_bytes);
    const double ratio = static_cast<double>(ledger.peak().bytes.total()) / predicted;
    EXPECT_LE(ratio, 1.02) << where << ", rank " << rank();
    EXPECT_GE(ratio, 0.6) << where << ", rank " << rank();
  }
}

// With the versions of weights that passes in flight use.
TEST(MeasurePipeline, TrainingWithoutABarrierNeedsNoMoreThanIsPredicted) {
  const std::vector<Tensor> sample = {torch::ones({64, 16})};
  const PipelineProfile profile = measure_pipeline(
      large_stages(), sample, world(), {.repeats = 1, .state_bytes_per_byte = 0, .each_link = false});
  for (const char* name : {"pipedream", "pipedream_vertical", "pipedream_2bw", "pipemare"}) {
    Ledger ledger;
    Pipeline pipeline(large_stages(), world(), {.micro_batches = 4, .schedule = name});
    torch::optim::SGD optimizer(pipeline.parameters(), torch::optim::SGDOptions(0.1));
    const Tensor batch = torch::ones({64 * 4, 16});
    ledger.reset_peak();
    pipeline.train(
        5, [&](std::uint32_t) { return Tensors{batch}; },
        [](const Tensors& outputs, std::uint32_t, std::uint32_t m) { return loss_of(outputs[0], m); },
        [&] { optimizer.step(); });
    const PipelineCost cost = simulate(cut_costs(profile, pipeline.cuts()), pipeline.train_schedule(5));
    const double ratio = static_cast<double>(ledger.peak().bytes.total()) /
                         static_cast<double>(cost.ranks[static_cast<std::size_t>(rank())].peak_bytes);
    EXPECT_LE(ratio, 1.02) << name << ", rank " << rank();
    EXPECT_GE(ratio, 0.6) << name << ", rank " << rank();
  }
}

TEST(MeasurePipeline, AnAsynchronousPipelineMeasuresAndPlansByItself) {
  const auto trained = [&](const PipelineOptions& options) {
    Pipeline pipeline(large_stages(), world(), options);
    torch::optim::SGD optimizer(pipeline.parameters(), torch::optim::SGDOptions(0.1));
    const Tensor losses = pipeline.train(
        3,
        [](std::uint32_t) {
          return Tensors{torch::ones({64, 16})};
        },
        [](const Tensors& outputs, std::uint32_t, std::uint32_t m) { return loss_of(outputs[0], m); },
        [&] { optimizer.step(); });
    return std::tuple(losses, pipeline.cuts(), pipeline.train_schedule(3), pipeline.plan());
  };
  PipelineOptions options{.micro_batches = 8, .schedule = "pipedream_2bw"};
  options.sample = PipelineSample{{torch::ones({8, 16})}};
  const auto [losses, cuts, schedule, plan] = trained(options);
  EXPECT_EQ(plan.find("pipedream_2bw of 32 micro-batches over"), 0U) << plan;
  PipelineOptions by_hand{.micro_batches = 8, .schedule = "pipedream_2bw"};
  by_hand.cuts = cuts;
  for (int rank = 0; rank + 1 < size(); ++rank) {  // the depth of a rank says the hops behind it
    const auto depth = [&](int of) {
      std::uint32_t forward = 0;
      for (const PipelineAction& action : schedule.actions[static_cast<std::size_t>(of)]) {
        if (action.kind != PipelineAction::Kind::kForward) break;
        ++forward;
      }
      return forward;
    };
    by_hand.hops.push_back(depth(rank) - depth(rank + 1));
  }
  const auto same_again = trained(by_hand);
  EXPECT_EQ(std::get<2>(same_again), schedule);
  EXPECT_TRUE(same(std::get<0>(same_again), losses));
}

// Logits, and what a loss of them keeps, may be the largest that a model has.
TEST(MeasurePipeline, ALossIsPartOfTheLastStage) {
  torch::nn::Sequential modules = net();
  const Tensor input = torch::ones({kRows, 4});
  MeasurePipelineOptions options{.repeats = 1, .each_link = false};
  const PipelineProfile without = measure_pipeline(modules, input, world(), options);
  options.loss = [](const Tensors& outputs) { return (outputs.front() * 2).exp().repeat({1, 1000}).sum(); };
  const PipelineProfile with = measure_pipeline(modules, input, world(), options);
  const std::size_t last = with.stages.size() - 1;
  // exp() keeps its output. The sum needs what is repeated while it runs.
  EXPECT_EQ(with.stages[last].kept_bytes, without.stages[last].kept_bytes + kRows * 3 * kFloat);
  EXPECT_GE(with.stages[last].working_bytes, kRows * 3000 * kFloat);
  for (std::size_t i = 0; i < last; ++i) EXPECT_EQ(with.stages[i].kept_bytes, without.stages[i].kept_bytes);
  options.loss = [](const Tensors& outputs) { return outputs.front(); };
  std::string told;
  try {
    measure_pipeline(modules, input, world(), options);
  } catch (const std::exception& error) {
    told = message_of(error);
  }
  expect_words(told, {"a loss is a single floating-point number"});
}

TEST(MeasurePipeline, MoreRanksThanStagesArePlannedForWhereChunksMayHaveSeveral) {
  torch::nn::Sequential one;
  torch::manual_seed(3);
  one->push_back(torch::nn::Linear(4, 3));
  const PipelineProfile profile =
      measure_pipeline(one, torch::ones({kRows, 4}), world(), {.repeats = 1, .each_link = false});
  EXPECT_EQ(profile.stages.size(), 1U);
  EXPECT_EQ(profile.stages.front().gradient_bytes, (4 * 3 + 3) * kFloat);
  PipelineSample sample{{torch::ones({kRows, 4})}};
  sample.may_replicate = true;
  Pipeline pipeline(one, world(), {.micro_batches = 8, .sample = sample});
  EXPECT_EQ(pipeline.schedule().rank_of.size(), static_cast<std::size_t>(size() == 3 ? 8 : size()));
  EXPECT_TRUE(pipeline.step(torch::ones({16, 4}), loss_of).defined());
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
  expect_words(config_error([&] {
                 measure_pipeline(std::vector<PipelineStage>(), {torch::ones({2, 2})}, world());
               }),
               {"no stage"});
}

}  // namespace
}  // namespace reef
