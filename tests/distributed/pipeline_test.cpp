// Run as several ranks by tests/support/ranks.py.
#include "reef/pipeline.h"

#include <array>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "pipelines.h"
#include "reef/chain.h"
#include "reef/pipeline_generator.h"
#include "reef/subgroup.h"

namespace reef {
namespace {

using namespace pipeline_tests;

constexpr std::int64_t kWidth = 6;

/// Twelve modules: what trains, what is frozen, what works in place, and what keeps buffers.
torch::nn::Sequential net(bool drops = false) {
  torch::manual_seed(7);
  torch::nn::Sequential modules;
  modules->push_back(torch::nn::Linear(4, kWidth));
  modules->push_back(torch::nn::Tanh());
  modules->push_back(torch::nn::Linear(kWidth, kWidth));
  modules->push_back(torch::nn::ReLU(torch::nn::ReLUOptions().inplace(true)));
  modules->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  modules->push_back(torch::nn::Dropout(drops ? 0.4 : 0.0));
  modules->push_back(torch::nn::Linear(kWidth, kWidth));
  modules->push_back(torch::nn::BatchNorm1d(kWidth));
  modules->push_back(torch::nn::ReLU(torch::nn::ReLUOptions().inplace(true)));
  modules->push_back(torch::nn::Linear(kWidth, kWidth));
  modules->push_back(torch::nn::Dropout(drops ? 0.4 : 0.0));
  modules->push_back(torch::nn::Linear(kWidth, 3));
  for (Tensor& parameter : modules[6]->parameters()) parameter.set_requires_grad(false);
  return modules;
}

Tensor batch(std::int64_t rows, std::int64_t seed = 1) {
  torch::manual_seed(static_cast<std::uint64_t>(100 + seed));
  return torch::randn({rows, 4});
}
/// Trains in one process, one micro-batch after another, and returns the mean of the losses.
Tensor alone(torch::nn::Sequential& modules, const Tensor& input, std::uint32_t micro_batches) {
  Tensor sum;
  const std::vector<Tensor> parts = input.tensor_split(micro_batches);
  for (std::uint32_t m = 0; m < micro_batches; ++m) {
    const Tensor loss = loss_of(modules->forward(parts[m]), m);
    loss.backward();
    sum = sum.defined() ? sum + loss.detach() : loss.detach();
  }
  for (Tensor& parameter : modules->parameters()) {
    if (parameter.grad().defined()) parameter.mutable_grad().div_(static_cast<std::int64_t>(micro_batches));
  }
  return sum / static_cast<std::int64_t>(micro_batches);
}

Tensor only_first(const Tensor& input, const Pipeline& pipeline) {
  return static_cast<int>(pipeline.schedule().rank_of.front().front()) == rank() ? input : Tensor();
}

/// How many modules each chunk but the last has, drawn from a seed: cuts anywhere.
PipelineCuts some_cuts(std::uint32_t chunks, std::uint32_t stages, std::uint64_t seed) {
  std::vector<std::uint32_t> places;
  for (std::uint32_t stage = 1; stage < stages; ++stage) places.push_back(stage);
  PipelineCuts cuts;
  while (cuts.size() + 1 < chunks) {
    seed = seed * 6364136223846793005U + 1442695040888963407U;
    const std::size_t at = (seed >> 33) % places.size();
    cuts.push_back(places[at]);
    places.erase(places.begin() + static_cast<std::ptrdiff_t>(at));
  }
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

struct Row {
  std::string schedule;
  std::uint32_t chunks_per_rank = 0;
  std::vector<std::uint32_t> hops = {};
};
std::vector<Row> rows() {
  std::vector<Row> rows = {{"gpipe"}, {"1f1b"},   {"1f1b", 0, {2}}, {"zero_bubble"}, {"zero_bubble", 0, {2}},
                           {"zbv"},   {"v_half"}, {"v_min"},        {"dualpipev"}};
  if (size() > 1) {
    for (const char* name : {"interleaved", "breadth_first", "interleaved_zero_bubble"})
      rows.push_back({name, 2});
  }
  return rows;
}
PipelineOptions options_of(const Row& row, std::uint32_t micro_batches) {
  return {.micro_batches = micro_batches,
          .schedule = row.schedule,
          .chunks_per_rank = row.chunks_per_rank,
          .hops = row.hops};
}

TEST(Pipeline, GradientsAreBitForBitThoseOfOneProcess) {
  std::uint64_t draw = 3;
  for (const Row& row : rows()) {
    for (const std::uint32_t micro_batches : {1U, 2U, 5U, 8U}) {
      if (row.schedule == "dualpipev" && micro_batches < 2U * static_cast<std::uint32_t>(size())) continue;
      const std::string where = " " + row.schedule + ", " + std::to_string(micro_batches);
      torch::nn::Sequential one = net();
      const Tensor input = batch(2 * micro_batches + 3);
      const Tensor expected_loss = alone(one, input, micro_batches);
      torch::nn::Sequential cut = net();
      PipelineOptions options = options_of(row, micro_batches);
      const std::uint32_t chunks =
          pipeline_schedule(row.schedule, {.ranks = static_cast<std::uint32_t>(size()),
                                           .micro_batches = micro_batches,
                                           .chunks_per_rank = row.chunks_per_rank,
                                           .hops = row.hops})
              .chunks();
      options.cuts = some_cuts(chunks, 12, ++draw);
      Pipeline pipeline(cut, world(), options);
      const Tensor loss = pipeline.step(only_first(input, pipeline), loss_of);
      EXPECT_TRUE(same(loss, expected_loss)) << where;
      expect_part_of(gradients_of(named_of(one)), pipeline, where);
      // Running averages have seen the micro-batches in the same order, on the rank that has them.
      const auto buffers = one[7]->named_buffers();
      for (const auto& buffer : cut[7]->named_buffers()) {
        const auto& own = pipeline.named_parameters();
        const bool is_own = std::any_of(own.begin(), own.end(),
                                        [](const auto& each) { return each.first.starts_with("7."); });
        EXPECT_TRUE(!is_own || same(buffer.value(), buffers[buffer.key()])) << buffer.key() << where;
      }
    }
  }
}

TEST(Pipeline, ChunksOfOneRankMayFollowEachOther) {
  // A V: the first and the last chunk are on rank 0, and two chunks meet on the last rank.
  std::vector<std::uint32_t> rank_of;
  for (int r = 0; r < size(); ++r) rank_of.push_back(static_cast<std::uint32_t>(r));
  for (int r = size(); r-- > 0;) rank_of.push_back(static_cast<std::uint32_t>(r));
  PipelineCosts costs;
  costs.chunks.assign(rank_of.size(), {1, 1, 1, 1, 1, 1});
  const std::vector<std::uint32_t> most(static_cast<std::size_t>(size()), 2 * rank_of.size());
  const std::uint32_t micro_batches = 5;
  PipelineOptions options;
  options.actions = greedy_pipeline(costs, {rank_of}, micro_batches, most, /*splits=*/false);
  torch::nn::Sequential one = net(), cut = net();
  const Tensor input = batch(10);
  const Tensor expected = alone(one, input, micro_batches);
  Pipeline pipeline(cut, world(), options);
  EXPECT_TRUE(same(pipeline.step(input, loss_of), expected));
  expect_part_of(gradients_of(named_of(one)), pipeline, "");
}

TEST(Pipeline, RandomNumbersDoNotDependOnTheCut) {
  ProcessGroupPtr apart;
  for (int r = 0; r < size(); ++r) {
    const std::int64_t only[] = {r};
    if (const ProcessGroupPtr group = subgroup(world(), only)) apart = group;
  }
  torch::nn::Sequential one = net(true);
  Pipeline whole(one, apart, {.micro_batches = 4, .schedule = "gpipe", .seed = 5});
  torch::nn::Sequential cut = net(true);
  Pipeline pipeline(
      cut, world(),
      {.micro_batches = 4, .cuts = some_cuts(static_cast<std::uint32_t>(size()), 12, 9), .seed = 5});
  std::vector<Tensor> losses;
  for (std::int64_t step = 0; step < 2; ++step) {
    const Tensor input = batch(9, step);
    torch::manual_seed(static_cast<std::uint64_t>(50 + step + rank()));
    const Tensor before = torch::rand({3});
    torch::manual_seed(static_cast<std::uint64_t>(50 + step + rank()));
    const Tensor expected = whole.step(input, loss_of);
    const Tensor loss = pipeline.step(input, loss_of);
    EXPECT_TRUE(same(torch::rand({3}), before)) << "the program's own random numbers";
    EXPECT_TRUE(same(loss, expected)) << step;
    losses.push_back(loss);
    expect_part_of(gradients_of(whole.named_parameters()), pipeline, " step " + std::to_string(step));
  }
  EXPECT_FALSE(same(losses[0], losses[1]));
  // Another seed drops other elements.
  torch::nn::Sequential again = net(true);
  Pipeline other(again, world(), {.micro_batches = 4, .seed = 6});
  EXPECT_FALSE(same(other.step(batch(9, 0), loss_of), losses[0]));
}

TEST(Pipeline, RecomputingChangesNoBit) {
  const std::uint32_t micro_batches = 2 * static_cast<std::uint32_t>(size());
  for (const Row& row : rows()) {
    torch::nn::Sequential plain = net(true), again = net(true);
    PipelineOptions options = options_of(row, micro_batches);
    options.seed = 3;
    Pipeline one(plain, world(), options);
    options.recompute = true;
    Pipeline other(again, world(), options);
    for (std::int64_t step = 0; step < 2; ++step) {
      const Tensor input = batch(2 * micro_batches + 3, step);
      EXPECT_TRUE(same(other.step(input, loss_of), one.step(input, loss_of))) << row.schedule;
      expect_part_of(gradients_of(one.named_parameters()), other, " " + row.schedule);
      const auto buffers = plain->named_buffers();
      for (const auto& buffer : again->named_buffers())
        EXPECT_TRUE(same(buffer.value(), buffers[buffer.key()])) << buffer.key() << " " << row.schedule;
    }
  }
  for (const bool recompute : {false, true}) {
    std::uint32_t runs = 0;
    std::vector<PipelineStage> stages(static_cast<std::size_t>(size()));
    for (PipelineStage& stage : stages) {
      const Tensor weight = torch::ones({2, 2}).set_requires_grad(true);
      stage.parameters = {{std::to_string(&stage - stages.data()), weight}};
      stage.run = [&runs, weight](const Tensors& given) -> Tensors {
        ++runs;
        return {given[0].mm(weight).tanh()};
      };
    }
    Pipeline pipeline(stages, world(), {.micro_batches = 3, .recompute = recompute});
    pipeline.step(torch::ones({3, 2}), loss_of);
    EXPECT_EQ(runs, recompute ? 6U : 3U);
  }
}

TEST(Pipeline, AChainIsAsTheModulesThatItRuns) {
  torch::nn::Sequential one = net();
  const Tensor input = batch(9);
  const Tensor expected_loss = alone(one, input, 4);
  for (const bool joined : {false, true}) {
    torch::nn::Sequential modules = net();
    Chain chain(modules);
    if (joined) {
      chain.join(1);
      chain.join(3);
    }
    Pipeline pipeline(chain, world(), {.micro_batches = 4});
    EXPECT_TRUE(same(pipeline.step(only_first(input, pipeline), loss_of), expected_loss));
    expect_part_of(gradients_of(named_of(one)), pipeline, joined ? ", joined" : ", a chain");
    EXPECT_EQ(pipeline.full_state_dict().size(),
              modules->named_parameters().size() + modules->named_buffers().size());
  }
  Chain unknown(net());
  unknown.add("last", [](const Tensor& x) { return x; });
  expect_words(config_error([&] { const Pipeline pipeline(unknown, world()); }),
               {"stage last", "with its module"});
}

TEST(Pipeline, GradientsThatAreThereAreAddedTo) {
  for (const Reduction reduction : {Reduction::kMean, Reduction::kSum}) {
    torch::nn::Sequential cut = net(), one = net();
    Pipeline pipeline(cut, world(), {.micro_batches = 3, .reduction = reduction});
    Bits expected;
    for (std::int64_t step = 0; step < 3; ++step) {
      const Tensor input = batch(6, step);
      one->zero_grad();
      const Tensor mean = alone(one, input, 3);
      if (reduction == Reduction::kSum) {
        one = net();
        std::vector<Tensor> parts = input.tensor_split(3);
        for (std::uint32_t m = 0; m < 3; ++m) loss_of(one->forward(parts[m]), m).backward();
      }
      for (const auto& [name, gradient] : gradients_of(named_of(one))) {
        if (!gradient.defined()) {
          expected[name] = Tensor();
        } else if (expected[name].defined()) {
          expected[name] += gradient;
        } else {
          expected[name] = gradient;
        }
      }
      pipeline.step(input, loss_of);
      expect_part_of(expected, pipeline, " step " + std::to_string(step));
    }
  }
}

TEST(Pipeline, ForwardGivesTheWholeBatchOnTheLastRank) {
  torch::nn::Sequential one = net(), cut = net();
  one->eval();
  cut->eval();
  Pipeline pipeline(cut, world(), {.micro_batches = 4});
  for (const std::int64_t rows : {4, 7, 21}) {  // shapes may change
    const Tensor input = batch(rows, rows);
    const Tensor output = pipeline.forward(only_first(input, pipeline));
    ASSERT_EQ(output.defined(), rank() == size() - 1);
    if (!output.defined()) continue;
    std::vector<Tensor> parts;
    const torch::NoGradGuard no_grad;
    for (const Tensor& part : input.tensor_split(4)) parts.push_back(one->forward(part));
    EXPECT_TRUE(same(output, torch::cat(parts)));
    EXPECT_FALSE(output.requires_grad());
  }
}

TEST(Pipeline, EachRankMakesItsOwnStagesOnly) {
  std::vector<std::uint32_t> made;
  std::vector<Pipeline::Maker> makers;
  for (std::uint32_t i = 0; i < 8; ++i) {
    makers.emplace_back([i, &made] {
      made.push_back(i);
      return stage_of_many(i);
    });
  }
  const Pipeline pipeline(makers, world(), {.micro_batches = 2});
  const auto own = static_cast<std::uint32_t>(rank());
  std::vector<std::uint32_t> expected;
  for (std::uint32_t i = 0; i < 8; ++i) {
    std::uint32_t chunk = 0;
    while (chunk < pipeline.cuts().size() && i >= pipeline.cuts()[chunk]) ++chunk;
    if (chunk == own) expected.push_back(i);
  }
  EXPECT_EQ(made, expected);
  EXPECT_EQ(pipeline.parameters().size(), expected.size());
}

/// Fails when it is called for the `at`-th time, in forward or in backward.
struct Fails : torch::autograd::Function<Fails> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        std::int64_t backward_fails) {
    context->saved_data["fails"] = backward_fails;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (context->saved_data["fails"].toInt() != 0) throw std::runtime_error("the backward pass of this test");
    return {gradients[0], Tensor()};
  }
};

TEST(Pipeline, WhatFailsAnywhereFailsEverywhereAndLeavesGradientsAsTheyWere) {
  constexpr std::uint32_t kMicroBatches = 3;
  for (std::uint32_t stage_that_fails = 0; stage_that_fails < 4; ++stage_that_fails) {
    for (std::uint32_t call = 0; call < kMicroBatches; ++call) {
      for (const bool in_backward : {false, true}) {
        bool armed = false;
        std::vector<PipelineStage> stages;
        std::map<std::uint32_t, std::uint32_t> calls;
        for (std::uint32_t i = 0; i < 4; ++i) {
          torch::manual_seed(i);
          const Tensor weight = torch::randn({3, 3}).set_requires_grad(true);
          PipelineStage stage;
          stage.parameters = {{std::to_string(i), weight}};
          stage.run = [&, i, weight](const Tensors& given) -> Tensors {
            const bool fails = armed && i == stage_that_fails && calls[i]++ == call;
            if (fails && !in_backward) throw std::runtime_error("the forward pass of this test");
            return {Fails::apply(given[0].mm(weight), fails && in_backward ? 1 : 0)};
          };
          stages.push_back(std::move(stage));
        }
        Pipeline pipeline(
            stages, world(),
            {.micro_batches = kMicroBatches, .schedule = std::array{"1f1b", "gpipe", "zero_bubble"}[call]});
        const Tensor input = torch::ones({6, 3});
        pipeline.step(input, loss_of);
        const Bits before = gradients_of(pipeline.named_parameters());
        armed = true;
        const std::uint32_t chunks = pipeline.schedule().chunks();
        std::uint32_t chunk = 0;
        while (chunk + 1 < chunks && stage_that_fails >= pipeline.cuts()[chunk]) ++chunk;
        const int fails_on = static_cast<int>(pipeline.schedule().rank(chunk, 0));
        try {
          pipeline.step(input, loss_of);
          ADD_FAILURE() << "did not throw";
        } catch (const PassAbandoned& error) {
          EXPECT_NE(rank(), fails_on);
          EXPECT_EQ(error.rank(), fails_on);
          expect_words(error.what(), {"rank " + std::to_string(fails_on), "chunk " + std::to_string(chunk),
                                      "micro-batch " + std::to_string(call),
                                      in_backward ? "backward pass" : "forward pass", "of this test"});
        } catch (const std::exception& error) {
          EXPECT_EQ(rank(), fails_on) << error.what();
          expect_words(error.what(), {"of this test"});
        }
        for (const auto& [name, gradient] : gradients_of(pipeline.named_parameters()))
          EXPECT_TRUE(same(gradient, before.at(name))) << name;
        armed = false;
        pipeline.step(input, loss_of);  // and all goes on
      }
    }
  }
}

TEST(Pipeline, WhatIsTrainedWithoutBeingAParameterIsRefused) {
  for (const bool split : {false, true}) {
    for (const int hidden_in : {0, size() - 1, size()}) {  // a stage, or the loss
      for (const bool recompute : {false, true}) {
        if (recompute && hidden_in < size()) continue;  // a region of checkpoint() hides it
        const Tensor hidden = torch::ones({3, 1}).set_requires_grad(true);
        std::vector<PipelineStage> stages(static_cast<std::size_t>(size()));
        for (int i = 0; i < size(); ++i) {
          const Tensor weight = torch::ones({3, 3}).set_requires_grad(true);
          PipelineStage& stage = stages[static_cast<std::size_t>(i)];
          stage.parameters = {{std::to_string(i), weight}};
          stage.run = [weight, hidden, uses = i == hidden_in](const Tensors& given) -> Tensors {
            const Tensor output = given[0].mm(weight);
            return {uses ? output * hidden.sum() : output};
          };
        }
        Pipeline pipeline(
            stages, world(),
            {.micro_batches = 2, .schedule = split ? "zero_bubble" : "1f1b", .recompute = recompute});
        const Tensor input = torch::ones({4, 3}).set_requires_grad(true);  // may want a gradient
        std::string told;
        try {
          pipeline.step(input, [&](const Tensor& output, std::uint32_t) {
            return hidden_in == size() ? output.mm(hidden).sum() : output.sum();
          });
        } catch (const std::exception& error) {
          told = message_of(error);
        }
        expect_words(
            told, {"a stage or the loss trains a tensor of sizes [3, 1]", "none of this chunk's parameters"});
        for (const Tensor& parameter : pipeline.parameters()) EXPECT_FALSE(parameter.grad().defined());
        hidden.set_requires_grad(false);
        pipeline.step(input, [](const Tensor& output, std::uint32_t) { return output.sum(); });
        EXPECT_EQ(input.grad().defined(), rank() == 0);
      }
    }
  }
}

TEST(Pipeline, WrongCallsAreRefusedOnEveryRank) {
  torch::nn::Sequential cut = net();
  const auto refused = [&](const PipelineOptions& options) {
    return config_error([&] { const Pipeline pipeline(cut, world(), options); });
  };
  if (size() > 1) {
    expect_words(refused({.micro_batches = static_cast<std::uint32_t>(2 + rank())}),
                 {"different options", "rank 1", "give the same"});
    expect_words(refused({.micro_batches = 4, .cuts = {13}}), {"cuts are the first stages"});
    expect_words(refused({.schedule = "interleaved", .chunks_per_rank = 13}), {"12 stages cannot be cut"});
    expect_words(refused({.schedule = "one_after_another"}), {"gpipe"});
    PipelineSchedule backwards =
        pipeline_schedule("gpipe", {.ranks = static_cast<std::uint32_t>(size()), .micro_batches = 2});
    for (auto& actions : backwards.actions) std::swap(actions[2], actions[3]);
    PipelineOptions own;
    own.actions = backwards;
    expect_words(refused(own), {"micro-batch 0", "behind a later one"});
    const Tensor weight = torch::ones({4});
    std::vector<PipelineStage> views(static_cast<std::size_t>(size()));
    for (std::size_t i = 0; i < views.size(); ++i) {
      views[i].parameters = {{std::to_string(i), weight.narrow(0, 0, 2).detach().set_requires_grad(true)}};
      views[i].run = [](const Tensors& given) { return given; };
    }
    expect_words(config_error([&] { const Pipeline pipeline(views, world(), {}); }),
                 {"1 shares memory with 0", "same parameter"});
    // A name is that of one parameter, also where ranks make their own stages.
    std::vector<Pipeline::Maker> alike(static_cast<std::size_t>(size()), [] { return stage_of_many(5); });
    expect_words(config_error([&] { const Pipeline pipeline(alike, world(), {}); }),
                 {"5.weight is the name of a parameter of stage 0 and of one of stage 1", "of its own"});
    // A maker fails on one rank.
    const std::vector<Pipeline::Maker> makers(static_cast<std::size_t>(size()), []() -> PipelineStage {
      if (rank() == 1) throw std::runtime_error("no such file of this test");
      return stage_of_many(0);
    });
    try {
      const Pipeline pipeline(makers, world(), {});
      ADD_FAILURE() << "did not throw";
    } catch (const ConfigError& error) {
      EXPECT_NE(rank(), 1);
      expect_words(error.what(), {"rank 1", "no such file of this test"});
    } catch (const std::exception& error) {
      EXPECT_EQ(rank(), 1);
      EXPECT_EQ(std::string(error.what()), "no such file of this test");
    }
  }
  // What is wrong with a batch is known on one rank, and all are told.
  Pipeline pipeline(cut, world(), {.micro_batches = 4});
  const auto told = [&](const std::function<void()>& call) {
    try {
      call();
    } catch (const ConfigError& error) {
      return message_of(error);
    } catch (const PassAbandoned& error) {
      return message_of(error);
    }
    return std::string("nothing was thrown");
  };
  expect_words(told([&] { pipeline.step(batch(3), loss_of); }),
               {"3 rows cannot be cut into 4 micro-batches"});
  expect_words(told([&] { pipeline.forward(batch(3)); }), {"3 rows cannot be cut into 4 micro-batches"});
  expect_words(told([&] { pipeline.step(Tensor(), loss_of); }), {"needs a batch"});
  expect_words(
      told([&] { pipeline.step(batch(8), [](const Tensor& output, std::uint32_t) { return output; }); }),
      {"a loss is a single"});
  expect_words(told([&] {
                 pipeline.step(batch(8), [](const Tensor& output, std::uint32_t micro_batch) {
                   const Tensor loss = output.square().mean();
                   return micro_batch == 2 ? loss.detach() : loss;
                 });
               }),
               {"the loss depends on nothing that requires grad"});
  EXPECT_NO_THROW(pipeline.step(batch(8), loss_of));
}

}  // namespace
}  // namespace reef
