// Stages that give tensors to later ones by names. Run as several ranks by tests/support/ranks.py.
#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "pipelines.h"
#include "reef/measure_pipeline.h"
#include "reef/pipeline_generator.h"

namespace reef {
namespace {

using namespace pipeline_tests;

constexpr std::int64_t kWidth = 5;
constexpr std::uint32_t kStages = 9;

/// What a skip of a random model is of.
enum class Given { kOutput, kProduct, kWhole, kNumbers };

struct Skip {
  std::string name;
  Given given;
  std::uint32_t from;
  std::vector<std::uint32_t> to;
};

std::vector<Skip> random_skips(std::mt19937_64& random) {
  std::vector<Skip> skips;
  for (const Given given :
       {Given::kOutput, Given::kProduct, Given::kWhole, Given::kNumbers, Given::kOutput}) {
    const auto from = static_cast<std::uint32_t>(random() % (kStages - 1));
    Skip skip{"skip " + std::to_string(skips.size()), given, from, {}};
    for (std::uint32_t to = from + 1; to < kStages; ++to) {
      if (random() % 3 == 0) skip.to.push_back(to);
    }
    if (skip.to.empty()) skip.to.push_back(kStages - 1);
    skips.push_back(std::move(skip));
  }
  return skips;
}

/// A model of linear stages with these skips, that a program in one process can run, too.
struct Model {
  explicit Model(std::vector<Skip> given, bool drops = false) : skips(std::move(given)) {
    torch::manual_seed(11);
    for (std::uint32_t i = 0; i < kStages; ++i) {
      linear.push_back(torch::nn::Linear(kWidth, kWidth));
      if (i == 4) linear.back()->weight.set_requires_grad(false);
    }
    for (std::uint32_t i = 0; i < kStages; ++i) stages.push_back(stage(i, drops));
  }

  PipelineStage stage(std::uint32_t number, bool drops) {
    PipelineStage stage;
    torch::nn::Linear own = linear[number];
    for (const auto& each : own->named_parameters())
      stage.parameters.emplace_back(std::to_string(number) + "." + each.key(), each.value());
    std::vector<Given> gives, takes;
    for (const Skip& skip : skips) {
      if (skip.from == number) {
        stage.gives.push_back(skip.name);
        gives.push_back(skip.given);
      }
      if (std::count(skip.to.begin(), skip.to.end(), number) == 0) continue;
      stage.takes.push_back(skip.name);
      takes.push_back(skip.given);
    }
    stage.run = [own, gives, takes, drops](const Tensors& inputs) mutable -> Tensors {
      Tensor x = inputs.front();
      for (std::size_t i = 0; i < takes.size(); ++i) {
        const Tensor& taken = inputs.at(1 + i);
        // Some are used twice.
        x = takes[i] == Given::kNumbers ? x + 0.1 * taken.to(x.scalar_type()) : x + taken * (x + 0.3 * taken);
      }
      x = own(x).tanh();
      if (drops) x = torch::dropout(x, 0.3, true);
      Tensors outputs = {x};
      for (const Given given : gives) {
        outputs.push_back(given == Given::kOutput    ? x
                          : given == Given::kProduct ? x * own->bias
                          : given == Given::kWhole   ? x.sum(0, true)
                                                     : (x > 0).to(torch::kLong));
      }
      return outputs;
    };
    return stage;
  }

  Tensor alone(const Tensor& input) {
    std::map<std::string, Tensor> known;
    Tensor x = input;
    for (const PipelineStage& stage : stages) {
      Tensors inputs = {x};
      for (const std::string& name : stage.takes) inputs.push_back(known.at(name));
      const Tensors outputs = stage.run(inputs);
      x = outputs.front();
      for (std::size_t i = 0; i < stage.gives.size(); ++i)
        known[stage.gives[i]] = torch::alias(outputs[1 + i]);
    }
    return x;
  }
  std::vector<std::pair<std::string, Tensor>> named() const {
    std::vector<std::pair<std::string, Tensor>> all;
    for (const PipelineStage& stage : stages)
      all.insert(all.end(), stage.parameters.begin(), stage.parameters.end());
    return all;
  }

  std::vector<Skip> skips;
  std::vector<torch::nn::Linear> linear;
  std::vector<PipelineStage> stages;
};

Tensor batch(std::int64_t rows) {
  torch::manual_seed(5);
  return torch::randn({rows, kWidth});
}

struct Row {
  std::string schedule;
  std::uint32_t chunks_per_rank = 0;
  bool recompute = false;
  bool in_runs = false;  ///< recomputes some runs of stages
};
std::vector<Row> rows() {
  std::vector<Row> rows = {{"gpipe"},
                           {"1f1b"},
                           {"1f1b", 0, true},
                           {"1f1b", 0, false, true},
                           {"zero_bubble"},
                           {"zero_bubble", 0, false, true},
                           {"zbv"},
                           {"zbv", 0, true},
                           {"zbv", 0, false, true},
                           {"v_half"}};
  if (size() > 1) rows.push_back({"interleaved", 2});
  if (size() % 2 == 0) rows.push_back({"chimera"});
  if (size() % 2 == 0) rows.push_back({"dualpipe"});
  return rows;
}
/// Some runs, of which cuts end others.
void add_random_runs(std::uint32_t first, const std::uint32_t before, std::mt19937_64& random,
                     RecomputedRuns& runs) {
  while (first < before) {
    const auto end = std::min(before, first + 1 + static_cast<std::uint32_t>(random() % 5));
    if (random() % 3 != 0 && (runs.empty() || runs.back() != RecomputedRun{first, end})) {
      runs.push_back({first, end});
      if (random() % 2 != 0) add_random_runs(first, end, random, runs);
    }
    first = end;
  }
}
/// Runs of which some lie in others.
RecomputedRuns random_runs(std::mt19937_64& random) {
  RecomputedRuns runs;
  add_random_runs(0, kStages, random, runs);
  return runs;
}
/// Of a chain of so many stages, at random.
PipelineCuts random_cuts(std::uint32_t chunks, std::mt19937_64& random) {
  std::vector<std::uint32_t> places;
  for (std::uint32_t stage = 1; stage < kStages; ++stage) places.push_back(stage);
  std::shuffle(places.begin(), places.end(), random);
  places.resize(chunks - 1);
  std::sort(places.begin(), places.end());
  return places;
}

TEST(PipelineSkips, GradientsAreThoseOfOneProcessWhereverTheModelIsCut) {
  std::mt19937_64 random(1);
  for (const Row& row : rows()) {
    for (int program = 0; program < 4; ++program) {
      const std::vector<Skip> skips = random_skips(random);
      const std::uint32_t micro_batches = 8;
      std::string where = row.schedule + (row.recompute ? ", recompute" : "");
      const std::uint32_t chunks = pipeline_schedule(row.schedule, {static_cast<std::uint32_t>(size()),
                                                                    micro_batches, row.chunks_per_rank})
                                       .chunks();
      PipelineOptions options{.micro_batches = micro_batches,
                              .schedule = row.schedule,
                              .chunks_per_rank = row.chunks_per_rank,
                              .cuts = random_cuts(chunks, random),
                              .recompute = row.recompute,
                              .recomputed = row.in_runs ? random_runs(random) : RecomputedRuns{},
                              .reduction = Reduction::kSum};
      for (const RecomputedRun& run : options.recomputed)
        where += " [" + std::to_string(run.first) + ", " + std::to_string(run.end) + ")";
      for (const std::uint32_t cut : options.cuts) where += " " + std::to_string(cut);
      for (const Skip& skip : skips) {
        where += "; " + std::to_string(skip.from) + " gives";
        for (const std::uint32_t to : skip.to) where += " " + std::to_string(to);
      }
      Model one(skips), cut(skips);
      // Each rank makes its own stages only.
      std::vector<Pipeline::Maker> makers;
      for (const PipelineStage& stage : cut.stages) makers.emplace_back([stage] { return stage; });
      Pipeline pipeline(makers, world(), options);
      const PipelineSchedule& schedule = pipeline.schedule();
      const Tensor input = batch(2 * micro_batches + 3);
      const std::vector<Tensor> parts = input.tensor_split(micro_batches);
      // Ranks of two directions add up theirs, and then each other's, in the order of ranks.
      const auto directions = static_cast<std::uint32_t>(schedule.rank_of.size());
      std::vector<Bits> of_direction;
      for (std::uint32_t direction = 0; direction < directions; ++direction) {
        for (auto& [name, parameter] : one.named()) parameter.mutable_grad().reset();
        for (std::uint32_t m = direction; m < micro_batches; m += directions)
          loss_of(one.alone(parts[m]), m).backward();
        of_direction.push_back(gradients_of(one.named()));
      }
      pipeline.step(input, loss_of);
      for (const auto& [name, gradient] : gradients_of(pipeline.named_parameters())) {
        const auto stage = static_cast<std::uint32_t>(std::stoul(name));
        const auto chunk =
            static_cast<std::size_t>(std::upper_bound(pipeline.cuts().begin(), pipeline.cuts().end(), stage) -
                                     pipeline.cuts().begin());
        Tensor expected = of_direction.front().at(name);
        if (directions == 2 && expected.defined()) {
          const bool second_is_first = schedule.rank_of[1][chunk] < schedule.rank_of[0][chunk];
          const Tensor other = of_direction.back().at(name);
          expected = second_is_first ? other + expected : expected + other;
        }
        ASSERT_EQ(gradient.defined(), expected.defined()) << name << " " << where;
        if (expected.defined()) {
          EXPECT_TRUE(same(gradient, expected)) << name << " " << where;
        }
      }
      const Tensor output = pipeline.forward(input);
      if (!output.defined()) continue;
      const torch::NoGradGuard no_grad;
      Tensors expected;
      for (const Tensor& part : parts) expected.push_back(one.alone(part));
      EXPECT_TRUE(same(output, torch::cat(expected))) << where;
    }
  }
}

/// A text for each parameter that this rank has: its bits after a step with dropout.
TEST(PipelineSkips, DropoutDoesNotDependOnTheCutAndNothingIsTakenFromMicroBatchToMicroBatch) {
  const std::vector<Skip> skips = {{"a", Given::kOutput, 0, {3, 6, 8}}, {"b", Given::kProduct, 2, {7}}};
  const Tensor input = batch(8);
  Bits first;
  for (const std::uint32_t by : {1U, 2U}) {
    Model model(skips, /*drops=*/true);
    PipelineOptions options{.micro_batches = 4, .recompute = by == 2};
    for (std::uint32_t chunk = 1; chunk < static_cast<std::uint32_t>(size()); ++chunk)
      options.cuts.push_back(by * chunk);
    Pipeline pipeline(model.stages, world(), options);
    const Tensor loss = pipeline.step(input, loss_of);
    const auto own = gradients_of(pipeline.named_parameters());
    if (by == 1) {
      first = own;
      first["loss"] = loss;
      continue;
    }
    EXPECT_TRUE(same(loss, first.at("loss")));
    for (const auto& [name, gradient] : own) {
      if (first.contains(name) && gradient.defined()) {
        EXPECT_TRUE(same(gradient, first.at(name))) << name;
      }
    }
  }
}

// Of a decoder that attends to what an encoder has made: each layer takes it.
TEST(PipelineSkips, LanesThatEndEarlierEndForWhatTheyGive) {
  const std::vector<Skip> skips = {{"a", Given::kOutput, 0, {2, 5, 8}}};
  Model one(skips), cut(skips);
  const auto lanes = static_cast<std::uint32_t>(size()) + 1;
  Pipeline pipeline(cut.stages, world(), {.micro_batches = lanes});
  std::vector<Tensors> starts;
  for (std::uint32_t lane = 0; lane < lanes; ++lane) starts.push_back({batch(lane + 1)});
  std::map<std::uint32_t, std::vector<Tensor>> seen;
  pipeline.generate(starts, 4,
                    [&](const Tensors& outputs, std::uint32_t lane, std::uint32_t step) -> Tensors {
                      seen[lane].push_back(outputs.front());
                      if (step == lane) return {};
                      return {outputs.front()};
                    });
  const torch::NoGradGuard no_grad;
  for (const auto& [lane, outputs] : seen) {
    ASSERT_EQ(outputs.size(), std::min(lane + 1, 4U));
    Tensor x = starts[lane].front();
    for (const Tensor& output : outputs) {
      x = one.alone(x);
      EXPECT_TRUE(same(output, x)) << lane;
    }
  }
}

TEST(PipelineSkips, WhatIsWrongIsRefusedOnEveryRank) {
  struct Wrong {
    std::vector<std::pair<std::uint32_t, std::string>> gives, takes;
    std::vector<std::string> words;
  };
  const std::vector<Wrong> rows = {
      {{{0, "a"}}, {}, {"stage 0 gives 'a'", "no stage takes"}},
      {{}, {{3, "a"}}, {"stage 3 takes 'a'", "no stage gives"}},
      {{{0, "a"}, {2, "a"}}, {{3, "a"}}, {"stage 2 gives 'a'", "as stage 0 does"}},
      {{{4, "a"}}, {{3, "a"}}, {"stage 3 takes 'a'", "stage 4 gives", "later"}},
      {{{3, "a"}}, {{3, "a"}}, {"stage 3 takes 'a'", "stage 3 gives"}},
      {{{0, "a"}}, {{3, "a"}, {3, "a"}}, {"stage 3 takes 'a' twice"}},
  };
  for (const Wrong& row : rows) {
    Model model({});
    for (const auto& [stage, name] : row.gives) model.stages[stage].gives.push_back(name);
    for (const auto& [stage, name] : row.takes) model.stages[stage].takes.push_back(name);
    expect_words(config_error([&] { Pipeline(model.stages, world(), {.micro_batches = 2}); }), row.words);
  }
  // A stage that returns fewer tensors than it gives names for.
  Model model({{"a", Given::kOutput, 0, {4}}});
  model.stages[0].run = [](const Tensors&) -> Tensors { return {}; };
  Pipeline pipeline(model.stages, world(), {.micro_batches = 2});
  std::string told;
  try {
    pipeline.step(batch(4), loss_of);
  } catch (const std::exception& error) {
    told = message_of(error);
  }
  expect_words(told, {"gives 'a'", "0 tensors", "last"});
}

TEST(PipelineSkips, WhatWasGivenIsNotModifiedUnnoticed) {
  // By a stage between, by one that takes it, and by one behind it that is on the same rank.
  for (const std::uint32_t by : {1U, 4U}) {
    for (const bool recompute : {false, true}) {
      Model model({{"a", Given::kOutput, 0, {4, 8}}});
      const auto run = model.stages[by].run;
      model.stages[by].run = [run, by](const Tensors& inputs) {
        if (by == 4) inputs.at(1).mul_(2);
        if (by == 1) inputs.front().mul_(2);
        return run(inputs);
      };
      PipelineCuts cuts;
      for (std::uint32_t chunk = 1; chunk < static_cast<std::uint32_t>(size()); ++chunk)
        cuts.push_back(4 + chunk);
      Pipeline pipeline(model.stages, world(), {.micro_batches = 2, .cuts = cuts, .recompute = recompute});
      std::string told;
      try {
        pipeline.step(batch(4), loss_of);
      } catch (const std::exception& error) {
        told = message_of(error);
      }
      expect_words(told, {"'a' was modified in place", "clone"});
    }
  }
}

TEST(PipelineSkips, APlanCountsWhatTheyCost) {
  const std::vector<Skip> skips = {{"a", Given::kOutput, 0, {3, 8}}, {"b", Given::kWhole, 2, {7}}};
  Model model(skips);
  const PipelineProfile profile = measure_pipeline(model.stages, {batch(6)}, world(), {.repeats = 1});
  const auto element = static_cast<std::uint64_t>(sizeof(float)), width = static_cast<std::uint64_t>(kWidth);
  const std::vector<PipelineSkip> expected = {{0, {3, 8}, 6 * width * element}, {2, {7}, width * element}};
  EXPECT_EQ(profile.skips, expected);
  EXPECT_EQ(profile.stages[0].output_bytes, 6 * width * element);
  Pipeline pipeline(model.stages, world(),
                    {.micro_batches = 4, .sample = PipelineSample{.micro_batch = {batch(6)}}});
  Model one(skips);
  const Tensor input = batch(24);
  for (std::uint32_t m = 0; m < 4; ++m) loss_of(one.alone(input.tensor_split(4)[m]), m).backward();
  for (auto& [name, parameter] : one.named()) {
    if (parameter.grad().defined()) parameter.mutable_grad().div_(4);
  }
  pipeline.step(input, loss_of);
  expect_part_of(gradients_of(one.named()), pipeline, " planned");
}

}  // namespace
}  // namespace reef
