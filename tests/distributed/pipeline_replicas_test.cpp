// Run as several ranks by tests/support/ranks.py.
#include <torch/optim/adamw.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pipelines.h"
#include "reef/clip_grad_norm.h"
#include "reef/pipeline.h"
#include "reef/pipeline_generator.h"

namespace reef {
namespace {

using namespace pipeline_tests;

/// Eight modules, of which one has no parameters, and one is frozen.
torch::nn::Sequential net(bool drops = false, std::uint64_t seed = 7) {
  torch::manual_seed(seed);
  torch::nn::Sequential modules;
  modules->push_back(torch::nn::Linear(4, 6));
  modules->push_back(torch::nn::Tanh());
  modules->push_back(torch::nn::Linear(6, 6));
  modules->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
  modules->push_back(torch::nn::Dropout(drops ? 0.4 : 0.0));
  modules->push_back(torch::nn::Linear(6, 6));
  modules->push_back(torch::nn::Linear(6, 6));
  modules->push_back(torch::nn::Linear(6, 3));
  for (Tensor& parameter : modules[5]->parameters()) parameter.set_requires_grad(false);
  return modules;
}
/// The batch of a replica.
Tensor batch_of(std::uint32_t replica, std::int64_t rows, std::int64_t step = 0) {
  torch::manual_seed(static_cast<std::uint64_t>(100 + 10 * step) + replica);
  return torch::randn({rows, 4});
}

using Row = ReplicasRow;
/// All that fill the group, with another rank beside each.
std::vector<Row> rows() {
  const auto ranks = static_cast<std::uint32_t>(size());
  std::vector<Row> rows;
  for (std::uint32_t replicas = 1; replicas <= ranks; ++replicas) {
    if (ranks % replicas != 0) continue;
    const std::uint32_t stages = ranks / replicas;
    if (replicas > 1) {
      for (const char* name : {"1f1b", "gpipe", "zero_bubble", "zbv"}) rows.push_back({name, replicas});
      if (stages > 1) {
        rows.push_back({"interleaved", replicas, 2});
        for (const char* name : {"1f1b", "zero_bubble", "zbv"}) rows.push_back({name, replicas, 0, false});
      }
    }
    if (stages % 2 == 0) {
      rows.push_back({"chimera", replicas});
      rows.push_back({"dualpipe", replicas});
    }
    for (Row& row : rows_of_ranks_per_chunk(stages, replicas)) rows.push_back(std::move(row));
  }
  return rows;
}
PipelineOptions options_of(const Row& row, Stage stage, std::uint32_t micro_batches = 4) {
  PipelineOptions options = pipeline_tests::options_of(row, stage, micro_batches, 200);
  if (stage == Stage::kParameters) options.shard.resident_bytes = 0;
  options.recompute = row.schedule == "gpipe";
  if (!row.cut_alike) {
    const auto ranks = static_cast<std::uint32_t>(size()) / row.replicas;
    options.replica_cuts = different_cuts(row.replicas, row.schedule == "zbv" ? 2 * ranks : ranks, 8);
  }
  return options;
}
std::vector<PipelineCuts> cuts_of(const Row& row, const Pipeline& pipeline) {
  if (row.cut_alike) return std::vector<PipelineCuts>(row.replicas, pipeline.cuts());
  return options_of(row, Stage::kReplicate).replica_cuts;
}

/// What the pipeline must give, made by one process: for each replica, and each of its ranks that has a
/// stage, in order, the sum over the micro-batches that it takes, in order; added up, and then divided.
struct Oracle {
  Oracle(const Pipeline& given, std::vector<PipelineCuts> of_replicas)
      : pipeline(given), cuts(std::move(of_replicas)), count(static_cast<std::uint32_t>(cuts.size())) {}

  Bits gradients(torch::nn::Sequential& modules, const std::function<Tensor(std::uint32_t)>& batch) {
    const PipelineSchedule& schedule = pipeline.schedule();
    const auto add = [](Tensor& sum, const Tensor& one) {
      if (one.defined()) sum = sum.defined() ? sum + one : one.clone();
    };
    using Owner = std::pair<std::uint32_t, std::uint32_t>;  // a replica, and a rank of it
    std::map<std::string, std::map<Owner, Tensor>> sums;
    Tensor losses;
    for (std::uint32_t replica = 0; replica < count; ++replica) {
      const std::vector<Tensor> parts = batch(replica).tensor_split(schedule.micro_batches);
      for (std::uint32_t m = 0; m < schedule.micro_batches; ++m) {
        modules->zero_grad();
        const Tensor one = loss_of(modules->forward(parts[m]), m);
        one.backward();
        add(losses, one.detach());
        for (const auto& [name, gradient] : gradients_of(named_of(modules))) {
          const auto stage = static_cast<std::uint32_t>(std::stoul(name));
          const std::uint32_t owner = schedule.rank(chunk_of(stage, cuts[replica]), m);
          add(sums[name][{replica, owner}], gradient);
        }
      }
    }
    const std::int64_t divisor = std::int64_t{count} * schedule.micro_batches;
    loss = losses / divisor;
    Bits all;
    for (const auto& [name, of_owners] : sums) {
      Tensor& sum = all[name];
      for (const auto& [owner, one] : of_owners) add(sum, one);
      if (sum.defined()) sum.div_(divisor);
    }
    modules->zero_grad();
    return all;
  }

  const Pipeline& pipeline;
  std::vector<PipelineCuts> cuts;  ///< of each replica
  std::uint32_t count;
  Tensor loss;
};

/// Compares with what is expected of each parameter, or of the part of it that this rank has.
void expect_gradients(const Pipeline& pipeline, const Bits& all, const std::string& where) {
  bool trains = false, compared = false;
  for (const auto& [name, parameter] : pipeline.named_parameters()) {
    trains = trains || parameter.requires_grad();
    const std::size_t bracket = name.find('[');
    const Tensor& whole = all.at(name.substr(0, bracket));
    ASSERT_EQ(parameter.grad().defined(), whole.defined()) << name << where;
    if (!whole.defined()) continue;
    Tensor expected = whole;
    if (bracket != std::string::npos) {
      const std::int64_t first = std::stoll(name.substr(bracket + 1));
      expected = whole.flatten().narrow(0, first, parameter.numel()).view(parameter.sizes());
    }
    EXPECT_TRUE(same(parameter.grad(), expected)) << name << where;
    compared = true;
  }
  EXPECT_EQ(compared, trains) << where;
}

constexpr Stage kStages[] = {Stage::kReplicate, Stage::kOptimizer, Stage::kGradients, Stage::kParameters};

TEST(PipelineReplicas, GradientsAreSumsOverRanksInTheirOrder) {
  for (const Row& row : rows()) {
    for (const Stage stage : kStages) {
      const std::string where = text_of(row, stage);
      const std::uint32_t own = static_cast<std::uint32_t>(rank()) % row.replicas;
      // Replicas begin with weights of their own, and become what the first one is.
      torch::nn::Sequential one = net(), cut = net(false, 7 + own);
      const Tensor graph = cut->forward(batch_of(0, 2));  // that is there before, as weight_norm makes one
      const std::uint32_t micro_batches = row.schedule == "dualpipe" ? 8 : 4;
      Pipeline pipeline(cut, world(), options_of(row, stage, micro_batches));
      Oracle oracle(pipeline, cuts_of(row, pipeline));
      Bits expected;
      for (std::int64_t step = 0; step < 2; ++step) {  // the second adds to the first
        const auto batch = [&](std::uint32_t replica) { return batch_of(replica, 10, step); };
        for (const auto& [name, gradient] : oracle.gradients(one, batch)) {
          if (gradient.defined())
            expected[name] = expected[name].defined() ? expected[name] + gradient : gradient;
          else
            expected[name];
        }
        const Tensor loss = pipeline.step(batch(own), loss_of);
        EXPECT_TRUE(same(loss, oracle.loss)) << where;
        expect_gradients(pipeline, expected, where + ", step " + std::to_string(step));
      }
    }
  }
}

TEST(PipelineReplicas, StepsAreThoseOfOneProcessAtEveryStage) {
  for (const Row& row : rows()) {
    for (const Stage stage : kStages) {
      const std::string where = text_of(row, stage);
      torch::nn::Sequential one = net(), cut = net();
      const std::uint32_t micro_batches = row.schedule == "dualpipe" ? 8 : 4;
      Pipeline pipeline(cut, world(), options_of(row, stage, micro_batches));
      Oracle oracle(pipeline, cuts_of(row, pipeline));
      std::vector<Tensor> trained;
      for (Tensor& parameter : one->parameters()) {
        if (parameter.requires_grad()) trained.push_back(parameter);
      }
      torch::optim::AdamW whole(trained, torch::optim::AdamWOptions(0.05));
      std::optional<torch::optim::AdamW> own;
      if (!pipeline.parameters().empty())
        own.emplace(pipeline.parameters(), torch::optim::AdamWOptions(0.05));
      const std::uint32_t replica = static_cast<std::uint32_t>(rank()) % row.replicas;
      for (std::int64_t step = 0; step < 3; ++step) {
        const auto batch = [&](std::uint32_t of) { return batch_of(of, 9, step); };
        const Bits expected = oracle.gradients(one, batch);
        for (auto& [name, parameter] : named_of(one)) parameter.mutable_grad() = expected.at(name);
        whole.step();
        EXPECT_TRUE(same(pipeline.step(batch(replica), loss_of), oracle.loss)) << where << step;
        if (own) {
          own->step();
          own->zero_grad();
        }
      }
      const Tensor input = batch_of(replica, 12);
      const Tensor output = pipeline.forward(input);
      if (!output.defined()) continue;
      const torch::NoGradGuard no_grad;
      Tensors parts;
      for (const Tensor& part : input.tensor_split(micro_batches)) parts.push_back(one->forward(part));
      EXPECT_TRUE(same(output, torch::cat(parts))) << where;
    }
  }
}

TEST(PipelineReplicas, TrainingIsStepAfterStep) {
  for (const Row& row : rows()) {
    for (const Stage stage : {Stage::kReplicate, Stage::kOptimizer, Stage::kParameters}) {
      const std::string where = text_of(row, stage);
      const std::uint32_t micro_batches = row.schedule == "dualpipe" ? 8 : 4;
      const std::uint32_t replica = static_cast<std::uint32_t>(rank()) % row.replicas;
      torch::nn::Sequential of_steps = net(true), trained = net(true);
      const PipelineOptions options = options_of(row, stage, micro_batches);
      Pipeline one(of_steps, world(), options), other(trained, world(), options);
      const auto optimizer_of = [](const Pipeline& pipeline) {
        return torch::optim::AdamW(std::vector<torch::optim::OptimizerParamGroup>{pipeline.parameters()},
                                   torch::optim::AdamWOptions(0.05));
      };
      torch::optim::AdamW step_one = optimizer_of(one), step_other = optimizer_of(other);
      std::vector<Tensor> losses;
      for (std::int64_t batch = 0; batch < 3; ++batch) {
        losses.push_back(one.step(batch_of(replica, 9, batch), loss_of));
        step_one.step();
        step_one.zero_grad();
      }
      for (const Tensor& parameter : other.parameters()) {
        if (parameter.requires_grad()) parameter.mutable_grad() = torch::ones_like(parameter);
      }
      const auto train = [&](std::uint32_t batches, const std::function<void()>& update) {
        return other.train(
            batches, [&](std::uint32_t batch) { return Tensors{batch_of(replica, 9, batch)}; },
            [](const Tensors& outputs, std::uint32_t, std::uint32_t m) { return loss_of(outputs[0], m); },
            update);
      };
      EXPECT_TRUE(same(train(3, [&] { step_other.step(); }), torch::stack(losses))) << where;
      for (std::size_t i = 0; i < one.parameters().size(); ++i) {
        const Tensor parameter = other.parameters()[i];
        EXPECT_TRUE(same(parameter, one.parameters()[i])) << one.named_parameters()[i].first << where;
        // Gradients that there were are what they were, and take no part.
        if (!parameter.requires_grad()) continue;
        EXPECT_TRUE(same(parameter.grad(), torch::ones_like(parameter))) << where;
      }
      if (stage != Stage::kOptimizer) continue;
      const StateDict whole = other.full_state_dict();
      expect_words(config_error([&] {
                     train(2, [] {
                       if (rank() == size() - 1) throw ConfigError("the update of this test");
                     });
                   }),
                   {"the update of this test"});
      expect_words(config_error([&] { other.forward(batch_of(replica, 9)); }),
                   {"update by batch 0", "load states"});
      other.load_state_dict({whole});
      train(1, [&] { step_other.step(); });
    }
  }
}

TEST(PipelineReplicas, TheNormIsThatOfAllRanks) {
  std::vector<Row> all = rows();
  all.push_back({"1f1b"});
  for (const Row& row : all) {
    for (const Stage stage : kStages) {
      const std::string where = text_of(row, stage);
      torch::nn::Sequential one = net(), cut = net();
      const std::uint32_t micro_batches = row.schedule == "dualpipe" ? 8 : 4;
      Pipeline pipeline(cut, world(), options_of(row, stage, micro_batches));
      Oracle oracle(pipeline, cuts_of(row, pipeline));
      Bits expected = oracle.gradients(one, [](std::uint32_t of) { return batch_of(of, 8); });
      for (auto& [name, parameter] : named_of(one)) parameter.mutable_grad() = expected.at(name);
      pipeline.step(batch_of(static_cast<std::uint32_t>(rank()) % row.replicas, 8), loss_of);
      const double norm = clip_grad_norm_(one->parameters(), 0.01);
      EXPECT_GT(norm, 0.01);
      EXPECT_EQ(pipeline.clip_grad_norm_(0.01), norm) << where;
      if (size() > 1 && !pipeline.parameters().empty())
        expect_words(config_error([&] { clip_grad_norm_(pipeline.parameters(), 0.01, world()); }),
                     {"other ranks have others", "clip_grad_norm_() of the pipeline"});
      for (auto& [name, parameter] : named_of(one)) expected.at(name) = parameter.grad();
      expect_gradients(pipeline, expected, where);
    }
  }
}

TEST(PipelineReplicas, WhatFailsInOneReplicaFailsInAll) {
  for (const Row& row : rows()) {
    for (const Stage stage : {Stage::kReplicate, Stage::kParameters}) {
      const std::string where = text_of(row, stage);
      const std::uint32_t micro_batches = row.schedule == "dualpipe" ? 8 : 4;
      for (const bool in_loss : {false, true}) {
        torch::nn::Sequential one = net(), cut = net();
        Pipeline pipeline(cut, world(), options_of(row, stage, micro_batches));
        Oracle oracle(pipeline, cuts_of(row, pipeline));
        const std::uint32_t replica = static_cast<std::uint32_t>(rank()) % row.replicas;
        const auto batch = [](std::uint32_t of) { return batch_of(of, 8); };
        const bool fails = replica + 1 == row.replicas;
        const auto step = [&](bool armed) {
          const Tensor input = armed && fails && !in_loss ? torch::ones({1, 4}) : batch(replica);
          return pipeline.step(input, [&](const Tensor& output, std::uint32_t m) {
            if (armed && fails && in_loss && m >= 2) throw std::runtime_error("the loss of this test");
            return loss_of(output, m);
          });
        };
        step(false);
        std::string told;
        try {
          step(true);
        } catch (const std::exception& error) {
          told = message_of(error);
        }
        expect_words(told, {in_loss ? "the loss of this test" : "1 rows cannot be cut"});
        const Bits expected = oracle.gradients(one, batch);
        expect_gradients(pipeline, expected, where + ", after a failure");
        for (Tensor& parameter : pipeline.parameters()) parameter.mutable_grad().reset();
        EXPECT_TRUE(same(step(false), oracle.loss)) << where;
        expect_gradients(pipeline, expected, where + ", after that");
      }
    }
  }
}

TEST(PipelineReplicas, RandomNumbersAreThoseOfOnePipelineOfAllMicroBatches) {
  if (size() != 2) GTEST_SKIP() << "for two ranks";
  torch::nn::Sequential whole = net(true), copies = net(true);
  Pipeline one(whole, world(), {.micro_batches = 4, .seed = 3});
  Pipeline two(copies, world(), {.micro_batches = 2, .replicas = 2, .seed = 3});
  const Tensor input = batch_of(0, 8);
  const auto loss = [](const Tensor& output, std::uint32_t) { return output.square().mean(); };
  const Tensor expected = one.step(input, loss);
  EXPECT_TRUE(same(two.step(input.chunk(2)[static_cast<std::size_t>(rank())], loss), expected));
}

TEST(PipelineReplicas, MixedPrecisionAndOffloadStepMasters) {
  for (const std::uint32_t replicas : {1U, static_cast<std::uint32_t>(size())}) {
    for (const Stage stage : {Stage::kReplicate, Stage::kGradients}) {
      torch::nn::Sequential one = net(), cut = net();
      PipelineOptions options = options_of({"1f1b", replicas}, stage);
      options.shard.mixed_precision = MixedPrecision{};
      options.shard.offload = true;
      Pipeline pipeline(cut, world(), options);
      const auto as_bfloat16 = [](const Tensor& output, std::uint32_t m) {
        return loss_of(output.to(at::kFloat), m);
      };
      const Tensor input = batch_of(0, 8).to(at::kBFloat16);
      pipeline.step(input, as_bfloat16);
      // One process: parameters rounded to bfloat16, gradients of a micro-batch in bfloat16, sums in it, too.
      one->to(at::kBFloat16);
      for (std::uint32_t m = 0; m < 4; ++m) as_bfloat16(one->forward(input.chunk(4)[m]), m).backward();
      for (const auto& [name, parameter] : pipeline.named_parameters()) {
        EXPECT_EQ(parameter.scalar_type(), at::kFloat) << name;
        ASSERT_TRUE(parameter.grad().defined()) << name;
        EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat) << name;
      }
      if (stage != Stage::kReplicate) continue;
      const Bits all = gradients_of(named_of(one));
      for (const auto& [name, parameter] : pipeline.named_parameters()) {
        Tensor sum;
        for (std::uint32_t r = 0; r < replicas; ++r) {
          const Tensor each = all.at(name).to(at::kFloat);
          sum = sum.defined() ? sum + each : each;
        }
        EXPECT_TRUE(same(parameter.grad(), sum / static_cast<std::int64_t>(4 * replicas))) << name;
      }
    }
  }
}

// Each rank looks at its own first micro-batch.
TEST(PipelineReplicas, WhatOneOfAChunksRanksTrainsWithoutBeingAParameterIsRefused) {
  const auto ranks = static_cast<std::uint32_t>(size());
  const Tensor weight = torch::ones({3, 3}).set_requires_grad(true),
               hidden = torch::ones({3}).set_requires_grad(rank() == size() - 1);
  PipelineStage stage;
  stage.parameters = {{"weight", weight}};
  stage.run = [weight, hidden](const Tensors& given) -> Tensors { return {given[0].mm(weight) * hidden}; };
  Pipeline pipeline(std::vector<PipelineStage>{stage}, world(),
                    {.micro_batches = 2 * ranks, .ranks_per_chunk = {ranks}});
  std::string told;
  try {
    pipeline.step(torch::ones({8, 3}), [](const Tensor& output, std::uint32_t) { return output.sum(); });
  } catch (const std::exception& error) {
    told = message_of(error);
  }
  expect_words(told, {"a stage or the loss trains a tensor of sizes [3]"});
}

TEST(PipelineReplicas, WrongOptionsAreRefusedOnEveryRank) {
  torch::nn::Sequential cut = net();
  const auto refused = [&](const PipelineOptions& options) {
    return config_error([&] { const Pipeline pipeline(cut, world(), options); });
  };
  expect_words(refused({.micro_batches = 2, .replicas = 0}), {"0 replicas"});
  expect_words(refused({.micro_batches = 2, .replicas = static_cast<std::uint32_t>(size() + 1)}),
               {"replicas cannot share", "divides"});
  PipelineOptions options{.micro_batches = 2};
  options.shard.reduction = Reduction::kSum;
  expect_words(refused(options), {"the pipeline's reduction"});
  options.shard.reduction = Reduction::kMean;
  options.shard.ignored = {cut->parameters().front()};
  expect_words(refused(options), {"ignored"});
  options.shard.ignored.clear();
  options.shard.compression = Compression::kOneBitAdam;
  expect_words(refused(options), {"one_bit_adam", "not compressed"});
  options.shard.compression = Compression::kNone;
  if (size() == 1) return;
  options.replicas = static_cast<std::uint32_t>(size());
  options.shard.stage = rank() == 1 ? Stage::kGradients : Stage::kOptimizer;
  expect_words(refused(options), {"different options", "stage", "rank 1"});
  options.shard.stage = Stage::kOptimizer;
  options.shard.bucket_bytes = 0;
  expect_words(refused(options), {"bucket_bytes 0"});
}

}  // namespace
}  // namespace reef
