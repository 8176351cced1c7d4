// Run as several ranks by tests/support/ranks.py. Weights that stages of different chunks share.
#include <torch/optim/adamw.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "pipelines.h"
#include "reef/clip_grad_norm.h"
#include "reef/pipeline.h"

namespace reef {
namespace {

using namespace pipeline_tests;
using PassKind = PipelineAction::Kind;

constexpr std::uint32_t kStages = 8;
/// Which weight each stage has: the first and the last one's is the same, and so is another one's.
constexpr std::uint32_t kWeightOf[kStages] = {0, 1, 2, 3, 4, 2, 5, 0};

/// A stage multiplies by its weight, the shared ones by its transpose in their second use.
struct Model {
  /// `apart`: each stage has a weight of its own, for an oracle that needs the gradient of each use.
  explicit Model(bool apart = false, std::uint64_t seed = 7) {
    torch::manual_seed(seed);
    for (std::uint32_t i = 0; i < 6; ++i) weights.push_back(torch::randn({5, 5}).mul_(0.5));
    for (std::uint32_t i = 0; i < kStages; ++i) {
      Tensor weight = weights[kWeightOf[i]];
      if (apart) weight = weight.clone();
      weight.set_requires_grad(true);
      const bool is_second = std::find(kWeightOf, kWeightOf + i, kWeightOf[i]) != kWeightOf + i;
      PipelineStage& stage = stages.emplace_back();
      stage.parameters = {{std::to_string(i) + ".weight", weight}};
      stage.run = [weight, is_second](const Tensors& given) -> Tensors {
        return {given[0].mm(is_second ? weight.t() : weight).tanh()};
      };
    }
  }
  const Tensor& weight(std::uint32_t stage) const { return stages[stage].parameters.front().second; }
  Tensor forward(const Tensor& input) const {
    Tensors now = {input};
    for (const PipelineStage& stage : stages) now = stage.run(now);
    return now.front();
  }
  std::vector<Pipeline::Maker> makers() const {
    std::vector<Pipeline::Maker> makers;
    for (const PipelineStage& stage : stages) makers.emplace_back([stage] { return stage; });
    return makers;
  }

  std::vector<Tensor> weights;
  std::vector<PipelineStage> stages;
};

Tensor batch_of(std::uint32_t replica, std::int64_t step) {
  torch::manual_seed(static_cast<std::uint64_t>(100 + 10 * step) + replica);
  return torch::randn({8, 5});
}

using Row = ReplicasRow;
std::vector<Row> rows() {
  std::vector<Row> rows;
  const auto ranks = static_cast<std::uint32_t>(size());
  for (std::uint32_t replicas = 1; replicas <= ranks; ++replicas) {
    if (ranks % replicas != 0) continue;
    for (const char* name : {"1f1b", "gpipe", "zero_bubble", "zbv"}) rows.push_back({name, replicas});
    if (ranks / replicas > 1) rows.push_back({"interleaved", replicas, 2});
    if (ranks / replicas % 2 == 0) rows.push_back({"chimera", replicas});
    for (Row& row : rows_of_ranks_per_chunk(ranks / replicas, replicas)) rows.push_back(std::move(row));
  }
  return rows;
}
constexpr std::uint32_t kMicroBatches = 4;

/// The gradient of each weight by its first name: for each replica, and each of its ranks that has a use of
/// it, in order, the sum over its passes in their order, each of which gives the sum of the chunk's uses;
/// added up, and divided.
Bits expected_gradients(const Pipeline& pipeline, const Model& apart, const Row& row, std::int64_t step) {
  const PipelineSchedule& schedule = pipeline.schedule();
  std::vector<std::vector<Tensors>> of_use(row.replicas);  // of a replica, a micro-batch, a stage
  for (std::uint32_t replica = 0; replica < row.replicas; ++replica) {
    const std::vector<Tensor> parts = batch_of(replica, step).tensor_split(kMicroBatches);
    for (std::uint32_t m = 0; m < kMicroBatches; ++m) {
      Tensors weights;
      for (std::uint32_t stage = 0; stage < kStages; ++stage) weights.push_back(apart.weight(stage));
      of_use[replica].push_back(torch::autograd::grad({loss_of(apart.forward(parts[m]), m)}, weights));
    }
  }
  Bits all;
  for (std::uint32_t weight = 0; weight < 6; ++weight) {
    std::vector<std::uint32_t> uses;
    for (std::uint32_t stage = 0; stage < kStages; ++stage) {
      if (kWeightOf[stage] == weight) uses.push_back(stage);
    }
    Tensor& sum = all[std::to_string(uses.front()) + ".weight"];
    for (std::uint32_t replica = 0; replica < row.replicas; ++replica) {
      for (std::uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
        Tensor own;
        for (const auto& [kind, chunk, m] : schedule.actions[rank]) {
          if (kind != PassKind::kBackward && kind != PassKind::kWeight) continue;
          Tensor of_pass;
          for (const std::uint32_t stage : uses) {
            if (chunk_of(stage, pipeline.cuts()) != chunk) continue;
            const Tensor& one = of_use[replica][m][stage];
            of_pass = of_pass.defined() ? of_pass + one : one;
          }
          if (of_pass.defined()) own = own.defined() ? own + of_pass : of_pass;
        }
        if (own.defined()) sum = sum.defined() ? sum + own : own;
      }
    }
    sum = sum / static_cast<std::int64_t>(row.replicas * kMicroBatches);
  }
  return all;
}

TEST(PipelineTied, StepsAndStatesAreThoseOfOneWeight) {
  for (const Row& row : rows()) {
    for (const Stage stage : {Stage::kReplicate, Stage::kOptimizer, Stage::kParameters}) {
      if (size() > 2 && stage == Stage::kParameters && row.schedule != "1f1b")
        continue;  // slow, and no other
      const std::string where = text_of(row, stage);
      const Model cut, apart(/*apart=*/true);
      Pipeline pipeline(cut.stages, world(), options_of(row, stage, kMicroBatches, 100));
      torch::optim::AdamW own(pipeline.parameters(), torch::optim::AdamWOptions(0.05));
      // One process, which steps each weight once.
      Model one;
      std::vector<Tensor> weights;
      for (Tensor& weight : one.weights) weights.push_back(weight);
      torch::optim::AdamW whole(weights, torch::optim::AdamWOptions(0.05));
      const std::uint32_t replica = static_cast<std::uint32_t>(rank()) % row.replicas;
      for (std::int64_t step = 0; step < 3; ++step) {
        const Bits expected = expected_gradients(pipeline, apart, row, step);
        for (std::uint32_t use = 0; use < kStages; ++use) {
          const auto found = expected.find(std::to_string(use) + ".weight");
          if (found != expected.end()) one.weights[kWeightOf[use]].mutable_grad() = found->second;
        }
        pipeline.step(batch_of(replica, step), loss_of);
        for (const auto& [name, parameter] : pipeline.named_parameters()) {
          const std::size_t bracket = name.find('[');
          Tensor gradient = expected.at(name.substr(0, bracket));
          if (bracket != std::string::npos) {
            gradient = gradient.flatten()
                           .narrow(0, std::stoll(name.substr(bracket + 1)), parameter.numel())
                           .view(parameter.sizes());
          }
          EXPECT_TRUE(same(parameter.grad(), gradient)) << name << where << ", step " << step;
        }
        EXPECT_EQ(pipeline.clip_grad_norm_(0.01), clip_grad_norm_(weights, 0.01)) << where;
        own.step();
        own.zero_grad();
        whole.step();
        const torch::NoGradGuard no_grad;
        for (std::uint32_t use = 0; use < kStages; ++use) apart.weight(use).copy_(one.weight(use));
      }
      const StateDict state = pipeline.full_state_dict();
      ASSERT_EQ(state.size(), kStages) << where;
      for (std::uint32_t use = 0; use < kStages; ++use)
        EXPECT_TRUE(same(state.at(std::to_string(use) + ".weight"), one.weight(use).detach()))
            << use << where;
      // A state under both names, and another cut.
      const OptimizerState of_optimizer = pipeline.full_optimizer_state(own);
      ASSERT_EQ(of_optimizer.groups.front().names.size(), 6U) << where;
      const Model other(/*apart=*/false, 11);
      Pipeline loaded(other.stages, world(), {.micro_batches = 1, .schedule = "gpipe"});
      torch::optim::AdamW by_loaded(loaded.parameters(), torch::optim::AdamWOptions(0.05));
      loaded.load_state_dict({state});
      loaded.load_optimizer_state(by_loaded, {of_optimizer});
      const StateDict again = loaded.full_state_dict();
      for (const auto& entry : state)
        EXPECT_TRUE(same(again.at(entry.key()), entry.value())) << entry.key() << where;
      EXPECT_EQ(loaded.full_optimizer_state(by_loaded).groups.front().names,
                of_optimizer.groups.front().names);
    }
  }
}

// It would be called with the gradient of one chunk's uses.
TEST(PipelineTied, AHookOfAWeightInSeveralChunksIsRefused) {
  Model model;
  Pipeline pipeline(model.stages, world(), {.micro_batches = 2});
  const Tensor& weight = model.stages.front().parameters.front().second;
  const auto step = [&] {
    try {
      pipeline.step(batch_of(0, 0), loss_of);
    } catch (const std::exception& error) {
      return message_of(error);
    }
    return std::string();
  };
  EXPECT_EQ(step(), "");
  const unsigned hook = weight.register_hook([](const Tensor& gradient) { return gradient.clamp(-1, 1); });
  expect_words(step(), {"0.weight is used in several chunks and has a hook"});
  weight.remove_hook(hook);
}

TEST(PipelineTied, WhatIsWrongInOneSegmentIsToldToAll) {
  Model model;
  const Tensor gaps = torch::ones({4, 2}).narrow(1, 0, 1).detach().set_requires_grad(true);
  model.stages.front().parameters.emplace_back("0.gaps", gaps);
  PipelineOptions options{.micro_batches = 2};
  options.shard.stage = Stage::kOptimizer;
  expect_words(config_error([&] { const Pipeline pipeline(model.stages, world(), options); }),
               {"0.gaps", "sparse or has gaps"});
}

TEST(PipelineTied, MakersSayWhichWeightsAreOne) {
  // Each rank makes weights of its own, which become those of the first rank that has them.
  const Model mine(/*apart=*/false, 7 + static_cast<std::uint64_t>(rank()));
  const Model one, apart(/*apart=*/true);
  PipelineOptions options{.micro_batches = kMicroBatches,
                          .tied = {{"7.weight", "0.weight"}, {"2.weight", "5.weight"}}};
  std::vector<Pipeline::Maker> makers = mine.makers();
  Pipeline pipeline(makers, world(), options);
  pipeline.step(batch_of(0, 0), loss_of);
  const StateDict state = pipeline.full_state_dict();
  EXPECT_TRUE(same(state.at("0.weight"), one.weight(0).detach()));
  EXPECT_TRUE(same(state.at("7.weight"), one.weight(0).detach()));
  for (const auto& [name, parameter] : pipeline.named_parameters()) {
    EXPECT_NE(name, "7.weight");
    EXPECT_NE(name, "5.weight");
  }
  StateDict apart_in_state;
  for (const auto& entry : state) apart_in_state.insert(entry.key(), entry.value());
  apart_in_state.insert_or_assign("7.weight", state.at("7.weight") + 1);
  expect_words(config_error([&] { pipeline.load_state_dict({apart_in_state}); }),
               {"7.weight and 0.weight are one parameter", "differ"});
  options.tied = {{"0.weight", "9.weight"}};
  expect_words(config_error([&] { const Pipeline wrong(makers, world(), options); }),
               {"9.weight", "no stage"});
  if (size() > 1) {
    options.tied = {{"0.weight", "1.weight"}};
    const Model another(/*apart=*/true);
    try {
      const Pipeline wrong(another.makers(), world(), options);
      ADD_FAILURE() << "two tensors were taken for one";
    } catch (const ConfigError& error) {
      expect_words(error.what(), {"1.weight is tied to 0.weight", "another tensor"});
    }
    options.tied = {{"0.weight", rank() == 0 ? "7.weight" : "6.weight"}};
    expect_words(config_error([&] { const Pipeline wrong(makers, world(), options); }),
                 {"different options", "tied"});
  }
}

}  // namespace
}  // namespace reef
