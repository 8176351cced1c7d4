// Pipeline::train(): what each chunk computes is bit for bit what one process does that follows the table of
// versions.
#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "pipeline_replay.h"
#include "reef/pipeline_generator.h"

namespace reef {
namespace {

using namespace train_tests;

std::vector<Row> rows() {
  const auto ranks = static_cast<std::uint32_t>(size());
  std::vector<Row> rows;
  for (const std::uint32_t hop : {1U, 2U}) {
    const std::uint32_t depth = 1 + hop * (ranks - 1);
    for (const std::uint32_t k : {1U, 2U, 5U}) {
      for (const char* name : {"pipedream", "pipedream_vertical", "pipemare"})
        rows.push_back({name, k, 0, {hop}});
    }
    for (const std::uint32_t k : {depth, depth + 2}) {
      for (const char* name : {"pipedream_2bw", "hetpipe"}) rows.push_back({name, k, 0, {hop}});
    }
  }
  for (const char* name : {"1f1b", "gpipe", "zero_bubble", "zbv", "v_half", "v_min", "greedy"})
    rows.push_back({name, 3});
  if (ranks > 1) {
    for (const char* name : {"interleaved", "breadth_first", "interleaved_zero_bubble"})
      rows.push_back({name, 4, 2});
  }
  for (const std::uint32_t synchronous : {0U, 2U, kBatches}) {
    rows.push_back({"pipemare", 2, 0, {}, 1, synchronous, 0.135});
    rows.push_back({"pipedream_vertical", 2, 0, {2}, 1, synchronous});
  }
  for (const std::uint32_t replicas : {2U, 3U, 4U}) {
    if (ranks % replicas != 0) continue;
    for (const char* name :
         {"pipedream", "pipemare", "pipedream_2bw", "1f1b", "zbv", "interleaved_zero_bubble"}) {
      if (ranks / replicas > 1 || name != std::string("interleaved_zero_bubble"))
        rows.push_back({name, 3, name == std::string("interleaved_zero_bubble") ? 2U : 0U, {}, replicas});
    }
    if (ranks == replicas) continue;
    for (const char* name : {"pipedream", "pipedream_vertical", "pipedream_2bw", "1f1b", "zero_bubble"}) {
      rows.push_back({name, 3, 0, {}, replicas});
      rows.back().replica_cuts = different_cuts(replicas, ranks / replicas, kStages);
    }
  }
  return rows;
}

TEST(PipelineTrain, IsBitForBitTheReplayOfTheTableOfVersions) {
  for (const Row& row : rows()) {
    for (const Rule rule : {Rule::kSgd, Rule::kAdamW}) {
      const std::string where = text_of(row) + (rule == Rule::kSgd ? ", SGD" : ", AdamW");
      Made made = make_stages();
      Pipeline pipeline(made.stages, world(), options_of(row));
      const auto optimizer = optimizer_of(rule, pipeline.parameters());
      std::vector<const void*> home;
      for (const Tensor& weight : made.weights) home.push_back(weight.const_data_ptr());
      const std::uint32_t per_batch = pipeline.micro_batches_of_batch();
      EXPECT_EQ(per_batch, row.micro_batches);
      const std::uint32_t replica = static_cast<std::uint32_t>(rank()) % row.replicas;
      const PipelineSchedule schedule = pipeline.train_schedule(kBatches);
      const Tensor losses = train(
          pipeline, kBatches, [&] { optimizer->step(); }, replica);
      std::vector<PipelineCuts> cuts = row.replica_cuts;
      if (cuts.empty()) cuts.assign(row.replicas, pipeline.cuts());
      const Replay expected = replay(schedule, cuts, per_batch, rule, row.correction_decay);
      EXPECT_TRUE(same(losses, torch::stack(expected.losses))) << where;
      for (const auto& [name, parameter] : pipeline.named_parameters()) {
        const auto stage = static_cast<std::size_t>(std::stoi(name));
        EXPECT_TRUE(same(parameter, expected.weights[stage])) << name << " " << where;
        EXPECT_EQ(parameter.const_data_ptr(), home[stage]) << name << " " << where;
        EXPECT_FALSE(parameter.grad().defined());
      }
    }
  }
}

TEST(PipelineTrain, ARankHoldsAsManyVersionsAsTheTableSays) {
  for (const Row& row : rows()) {
    std::vector<std::set<const void*>> memory(kStages);
    Made made = make_stages(
        [&](std::uint32_t stage, const Tensor& weight) { memory[stage].insert(weight.const_data_ptr()); });
    Pipeline pipeline(made.stages, world(), options_of(row));
    const auto optimizer = optimizer_of(Rule::kSgd, pipeline.parameters());
    const PipelineVersions versions = pipeline_versions(pipeline.train_schedule(4 * kBatches));
    train(pipeline, 4 * kBatches, [&] {
      optimizer->step();
      for (const auto& [name, parameter] : pipeline.named_parameters())
        memory[static_cast<std::size_t>(std::stoi(name))].insert(parameter.const_data_ptr());
    });
    for (std::uint32_t stage = 0; stage < kStages; ++stage) {
      std::uint32_t chunk = 0;
      while (chunk < pipeline.cuts().size() && pipeline.cuts()[chunk] <= stage) ++chunk;
      if (memory[stage].empty()) continue;  // of another rank
      const std::size_t found = memory[stage].size();
      EXPECT_EQ(found, versions.most_alive[chunk]) << text_of(row) << ", stage " << stage;
    }
  }
}

torch::nn::Sequential net_of_many() {
  torch::manual_seed(7);
  torch::nn::Sequential modules;
  for (int i = 0; i < 4; ++i) {
    modules->push_back(torch::nn::Linear(kWidth, kWidth));
    modules->push_back(torch::nn::BatchNorm1d(kWidth));
    modules->push_back(torch::nn::Dropout(0.3));
    modules->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  }
  modules[4]->as<torch::nn::Linear>()->weight.set_requires_grad(false);
  return modules;
}

TEST(PipelineTrain, BySynchronousSchedulesIsStepAfterStep) {
  for (const Row& row : rows()) {
    if (pipeline_schedule(row.schedule, {.ranks = static_cast<std::uint32_t>(size()) / row.replicas,
                                         .micro_batches = row.micro_batches,
                                         .chunks_per_rank = row.chunks_per_rank,
                                         .hops = row.hops,
                                         .micro_batches_per_update = row.micro_batches})
            .versions.kind != PipelineVersionRule::Kind::kFlush) {
      continue;
    }
    for (const bool recompute : {false, true}) {
      const std::string where = text_of(row) + (recompute ? ", recompute" : "");
      const std::uint32_t replica = static_cast<std::uint32_t>(rank()) % row.replicas;
      torch::nn::Sequential of_steps = net_of_many(), trained = net_of_many();
      PipelineOptions options = options_of(row);
      options.recompute = recompute;
      Pipeline one(of_steps, world(), options), other(trained, world(), options);
      const auto step_one = optimizer_of(Rule::kAdamW, one.parameters());
      const auto step_other = optimizer_of(Rule::kAdamW, other.parameters());
      for (const std::uint32_t batches : {1U, 3U, 2U}) {  // and the random numbers go on from call to call
        std::vector<Tensor> losses;
        for (std::uint32_t batch = 0; batch < batches; ++batch) {
          losses.push_back(one.step(Tensors{batch_of(batch, row.micro_batches, replica)},
                                    [&](const Tensors& outputs, std::uint32_t micro_batch) {
                                      return loss_in(batch, micro_batch, outputs[0]);
                                    }));
          step_one->step();
          step_one->zero_grad();
        }
        EXPECT_TRUE(same(train(
                             other, batches, [&] { step_other->step(); }, replica),
                         torch::stack(losses)))
            << where;
      }
      for (std::size_t i = 0; i < one.named_parameters().size(); ++i)
        EXPECT_TRUE(same(one.parameters()[i], other.parameters()[i]))
            << one.named_parameters()[i].first << where;
      const auto buffers = of_steps->named_buffers();
      for (const auto& buffer : trained->named_buffers())
        EXPECT_TRUE(same(buffer.value(), buffers[buffer.key()])) << buffer.key() << where;
    }
  }
}

TEST(PipelineTrain, SynchronousBatchesAreCountedOverCalls) {
  Row row{"pipemare", 3};
  row.synchronous_batches = 3;
  Made made = make_stages(), other = make_stages();
  Pipeline pipeline(made.stages, world(), options_of(row)),
      flushing(other.stages, world(), options_of({"1f1b", 3}));
  const auto step = optimizer_of(Rule::kAdamW, pipeline.parameters());
  const auto step_other = optimizer_of(Rule::kAdamW, flushing.parameters());
  for (const std::uint32_t batches : {1U, 2U}) {
    EXPECT_TRUE(same(train(pipeline, batches, [&] { step->step(); }),
                     train(flushing, batches, [&] { step_other->step(); })));
    for (std::size_t i = 0; i < pipeline.parameters().size(); ++i)
      EXPECT_TRUE(same(pipeline.parameters()[i], flushing.parameters()[i]));
  }
  EXPECT_EQ(pipeline.train_schedule(2).actions,
            pipeline_schedule("pipemare", {.ranks = static_cast<std::uint32_t>(size()),
                                           .micro_batches = 6,
                                           .micro_batches_per_update = 3})
                .actions);
}

TEST(PipelineTrain, CallsFollowEachOther) {
  const Row row{"pipedream", 2};
  Made made = make_stages();
  Pipeline pipeline(made.stages, world(), options_of(row));
  const auto optimizer = optimizer_of(Rule::kAdamW, pipeline.parameters());
  for (const Tensor& parameter : pipeline.parameters())
    parameter.mutable_grad() = torch::ones_like(parameter);
  const Tensor first = train(pipeline, 1, [&] { optimizer->step(); });
  const Tensor second = train(pipeline, kBatches, [&] { optimizer->step(); });
  // Gradients that there were are what they were, and take no part.
  for (const Tensor& parameter : pipeline.parameters())
    EXPECT_TRUE(same(parameter.grad(), torch::ones_like(parameter)));
  EXPECT_TRUE(same(
      first, replay(pipeline.train_schedule(1), {pipeline.cuts()}, 2, Rule::kAdamW).losses[0].reshape({1})));
  EXPECT_LT(second[0].item<float>(), first[0].item<float>());  // of the same batch, after an update
  const Tensor output = pipeline.forward(batch_of(0, 2));
  EXPECT_EQ(output.defined(), rank() == size() - 1);
}

/// The numbers of all ranks.
std::vector<std::int64_t> of_all_ranks(std::uint32_t own) {
  std::vector<Tensor> told = {torch::zeros({size()}, at::kLong)};
  told[0][rank()] = static_cast<std::int64_t>(own);
  world()->allreduce(told)->wait();
  const auto* const first = told[0].const_data_ptr<std::int64_t>();
  return {first, first + size()};
}

TEST(PipelineTrain, WhatFailsSaysWhatChunksHaveHad) {
  struct Fault {
    std::uint32_t stage, micro_batch, replicas = 1;
  };
  std::vector<Fault> faults = {{0, 0}, {0, 3}, {kStages - 1, 0}, {kStages - 1, 3}};
  if (size() % 2 == 0) faults.insert(faults.end(), {{0, 3, 2}, {kStages - 1, 0, 2}, {kStages - 1, 3, 2}});
  for (const auto& [stage_that_fails, at, replicas] : faults) {
    const auto replica = static_cast<std::uint32_t>(rank()) % replicas;
    bool armed = replica == replicas - 1;  // the last one fails
    std::uint32_t passes = 0;
    Made made = make_stages([&, fails_in = stage_that_fails, call = at](std::uint32_t stage, const Tensor&) {
      if (armed && stage == fails_in && passes++ == call) throw std::runtime_error("a pass of this test");
    });
    PipelineOptions options = options_of({"pipedream", 1});
    options.replicas = replicas;
    Pipeline pipeline(made.stages, world(), options);
    const auto optimizer = optimizer_of(Rule::kSgd, pipeline.parameters());
    const StateDict before = pipeline.full_state_dict();
    std::uint32_t updates = 0;
    const auto update = [&] {
      optimizer->step();
      ++updates;
    };
    const int fails_on = stage_that_fails == 0 ? static_cast<int>(replicas) - 1 : size() - 1;
    try {
      train(pipeline, kBatches, update, replica);
      ADD_FAILURE() << "did not throw";
    } catch (const PassAbandoned& error) {
      EXPECT_NE(rank(), fails_on);
      EXPECT_EQ(error.rank(), fails_on);
      expect_words(error.what(), {"a pass of this test", "micro-batch " + std::to_string(at)});
    } catch (const std::exception& error) {
      EXPECT_EQ(rank(), fails_on) << error.what();
      expect_words(error.what(), {"a pass of this test"});
    }
    armed = false;
    for (const Tensor& parameter : pipeline.parameters()) EXPECT_FALSE(parameter.grad().defined());
    const std::vector<std::int64_t> all = of_all_ranks(updates);
    const bool is_even =
        std::all_of(all.begin(), all.end(), [&](std::int64_t each) { return each == all[0]; });
    EXPECT_TRUE(is_even || at > 0);
    if (!is_even) {
      const std::string told = config_error([&] { train(pipeline, 1, update); });
      for (std::size_t chunk = 0; chunk < pipeline.schedule().chunks(); ++chunk)
        expect_words(
            told, {"chunk " + std::to_string(chunk) + " has had " + std::to_string(all[chunk * replicas])});
      expect_words(config_error([&] { pipeline.forward(batch_of(0, 1)); }), {"load states"});
      pipeline.load_state_dict({before});
    }
    train(pipeline, kBatches, update, replica);
  }
}

TEST(PipelineTrain, WrongCallsAreRefusedOnEveryRank) {
  Made made = make_stages();
  Pipeline pipeline(made.stages, world(), options_of({"pipedream", 2}));
  const auto nothing = [] {};
  expect_words(config_error([&] { train(pipeline, 0, nothing); }), {"no batches"});
  expect_words(config_error([&] { train(pipeline, 10'000'000, nothing); }),
               {"10000000 batches of 2 micro-batches", "several calls"});
  expect_words(config_error([&] {
                 pipeline.step(batch_of(0, 2),
                               [](const Tensor& output, std::uint32_t) { return output.mean(); });
               }),
               {"pipedream", "asynchronous", "train()"});
  const std::string inside = [&] {
    try {
      train(pipeline, 1, [&] { pipeline.clip_grad_norm_(1.0); });
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string();
  }();
  expect_words(inside, {"clip_grad_norm_", "when the pipeline's call has returned"});
  if (size() == 1) return;
  expect_words(config_error([&] { train(pipeline, static_cast<std::uint32_t>(1 + rank()), nothing); }),
               {"the number of batches is 1 on rank 0 and 2 on rank 1"});
  // What the executor cannot run.
  const auto refused = [&](const PipelineSchedule& schedule) {
    PipelineOptions options;
    options.actions = schedule;
    return config_error([&] { const Pipeline other(made.stages, world(), options); });
  };
  PipelineSchedule own = pipeline.train_schedule(2);
  EXPECT_EQ(refused(own), "");
  own.versions.kind = PipelineVersionRule::Kind::kFlush;
  expect_words(refused(own), {"updates weights", "no rule"});
  own = pipeline.train_schedule(2);
  for (auto& actions : own.actions) actions.pop_back();
  expect_words(refused(own), {"does not update chunk 0 after micro-batch 3", "add an update"});
  own = pipeline.train_schedule(2);
  for (auto& actions : own.actions) {  // behind the next backward pass
    const auto update = std::find_if(actions.begin(), actions.end(), [](const PipelineAction& action) {
      return action.kind == PipelineAction::Kind::kUpdate;
    });
    const auto next = std::find_if(update, actions.end(), [](const PipelineAction& action) {
      return action.kind == PipelineAction::Kind::kBackward;
    });
    std::rotate(update, update + 1, next + 1);
  }
  expect_words(refused(own), {"updates chunk 0 for micro-batch 1", "let it follow them"});
  own = pipeline.train_schedule(2);
  own.versions.kind = PipelineVersionRule::Kind::kTwoBuffers;
  own.versions.micro_batches_per_update = 1;
  expect_words(refused(own), {"needs its weights after update"});
  PipelineOptions options = options_of({"pipedream_2bw", 4});
  options.synchronous_batches = 1;
  expect_words(config_error([&] { const Pipeline other(made.stages, world(), options); }),
               {"synchronous_batches", "pipedream_2bw"});
  options = options_of({"pipedream", 4});
  options.correction_decay = 0.1;
  expect_words(config_error([&] { const Pipeline other(made.stages, world(), options); }),
               {"correction_decay", "pipemare"});
  // What shards, or shares.
  options = options_of({"pipedream", 2});
  options.shard.stage = Stage::kOptimizer;
  Pipeline sharded(made.stages, world(), options);
  expect_words(config_error([&] { train(sharded, 1, nothing); }), {"not sharded"});
  std::vector<PipelineStage> tied = make_stages().stages;
  tied.back().parameters = {{"7.weight", tied.front().parameters[0].second}};
  tied.back().run = tied.front().run;
  Pipeline shares(tied, world(), options_of({"pipedream", 2}));
  expect_words(config_error([&] { train(shares, 1, nothing); }), {"not shared by other chunks"});
  if (size() % 2 != 0) return;
  Pipeline two(make_stages().stages, world(), options_of({"chimera", 4}));
  expect_words(config_error([&] { two.train_schedule(1); }), {"several directions", "step by step"});
  if (size() == 2) return;
  options = {.replicas = 2,
             .replica_cuts = different_cuts(2, static_cast<std::uint32_t>(size()) / 2, kStages)};
  options.actions =
      pipeline_schedule("pipedream", {.ranks = static_cast<std::uint32_t>(size()) / 2, .micro_batches = 4});
  Pipeline cut_differently(make_stages().stages, world(), options);
  expect_words(config_error([&] { train(cut_differently, 4, nothing); }),
               {"schedule of your own", "cut alike"});
}

}  // namespace
}  // namespace reef
