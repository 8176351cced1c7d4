// Run as several ranks by tests/support/ranks.py.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "pipelines.h"
#include "reef/pipeline.h"
#include "reef/pipeline_generator.h"

namespace reef {
namespace {

using namespace pipeline_tests;

/// Eight stages, each of which keeps all inputs that it has had for each lane.
struct Remembering {
  Remembering() {
    torch::manual_seed(7);
    for (std::uint32_t i = 0; i < 8; ++i) {
      const Tensor weight = torch::randn({4, 4});
      PipelineStage& stage = stages.emplace_back();
      stage.parameters = {{std::to_string(i), weight}};
      stage.run = [this, i, weight](const Tensors& given) -> Tensors {
        const std::uint32_t lane = pipeline_micro_batch().value_or(alone);
        Tensor& seen = memory[{i, lane}];
        seen = seen.defined() ? torch::cat({seen, given[0]}) : given[0];
        return {(given[0] + seen.mean(0, /*keepdim=*/true)).mm(weight).tanh()};
      };
    }
  }
  std::vector<PipelineStage> stages;
  std::map<std::pair<std::uint32_t, std::uint32_t>, Tensor> memory;
  std::uint32_t alone = 0;  ///< the lane, outside of a pipeline
};

Tensor start_of(std::uint32_t lane) {
  torch::manual_seed(100 + lane);
  return torch::randn({1, 4});
}
/// Lanes end after different numbers of steps, some with the last one.
bool ends(std::uint32_t lane, std::uint32_t step) { return step + 1 >= 1 + (lane * 3) % 7; }

using Outputs = std::map<std::pair<std::uint32_t, std::uint32_t>, Tensor>;  // of a lane and a step
Pipeline::Next next(Outputs& outputs) {
  return [&](const Tensors& made, std::uint32_t lane, std::uint32_t step) -> Tensors {
    outputs[{lane, step}] = made[0].clone();
    return ends(lane, step) ? Tensors() : Tensors{made[0] * 0.5 + step};
  };
}
Outputs alone(std::uint32_t lanes, std::uint32_t steps) {
  Remembering model;
  Outputs outputs;
  const Pipeline::Next follow = next(outputs);
  const torch::NoGradGuard no_grad;
  for (std::uint32_t lane = 0; lane < lanes; ++lane) {
    model.alone = lane;
    Tensors now = {start_of(lane)};
    for (std::uint32_t step = 0; step < steps && !now.empty(); ++step) {
      for (const PipelineStage& stage : model.stages) now = stage.run(now);
      now = follow(now, lane, step);
    }
  }
  return outputs;
}

TEST(PipelineGenerate, LanesGoTheirOwnWaysAsInOneProcess) {
  for (const char* schedule : {"1f1b", "zbv", "interleaved", "chimera"}) {
    if (size() == 1 && std::string(schedule) == "interleaved") continue;
    if (size() % 2 == 1 && std::string(schedule) == "chimera") continue;
    for (const std::uint32_t lanes : {1U, 2U, 5U}) {
      for (const std::uint32_t steps : {1U, 6U}) {
        const std::string where = " " + std::string(schedule) + ", " + std::to_string(lanes) + " lanes, " +
                                  std::to_string(steps) + " steps";
        Remembering model;
        PipelineOptions options{.micro_batches = lanes, .schedule = schedule};
        if (options.schedule == "interleaved") options.chunks_per_rank = 2;
        if (options.schedule == "chimera") options.shard.stage = Stage::kParameters;
        for (PipelineStage& stage : model.stages) stage.parameters.front().second.set_requires_grad(true);
        Pipeline pipeline(model.stages, world(), options);
        std::vector<Tensors> starts;
        for (std::uint32_t lane = 0; lane < lanes; ++lane) starts.push_back({start_of(lane)});
        Outputs outputs;
        pipeline.generate(starts, steps, next(outputs));
        const Outputs expected = alone(lanes, steps);
        const bool has_last = static_cast<int>(pipeline.schedule().rank_of.front().back()) == rank();
        ASSERT_EQ(outputs.size(), has_last ? expected.size() : 0) << where;
        for (const auto& [place, output] : outputs)
          EXPECT_TRUE(same(output, expected.at(place)))
              << "lane " << place.first << ", step " << place.second << where;
        EXPECT_FALSE(pipeline_micro_batch().has_value());
      }
    }
  }
}

TEST(PipelineGenerate, WhatFailsIsToldToAllAndTheNextCallGoesOn) {
  Remembering model;
  Pipeline pipeline(model.stages, world(), {.micro_batches = 3});
  const std::vector<Tensors> starts(3, Tensors{torch::ones({1, 4})});
  std::string told;
  try {
    pipeline.generate(starts, 50, [](const Tensors& outputs, std::uint32_t lane, std::uint32_t step) {
      if (lane == 1 && step == 3) throw std::runtime_error("the sampler of this test");
      return outputs;
    });
  } catch (const std::exception& error) {
    told = message_of(error);
  }
  expect_words(told, {"the sampler of this test"});
  told.clear();
  try {
    pipeline.generate({starts[0]}, 2,
                      [](const Tensors& outputs, std::uint32_t, std::uint32_t) { return outputs; });
  } catch (const std::exception& error) {
    told = message_of(error);
  }
  expect_words(told, {"1 lanes", "3 micro-batches"});
  std::uint32_t calls = 0;
  pipeline.generate(starts, 4, [&](const Tensors& outputs, std::uint32_t, std::uint32_t) {
    ++calls;
    return outputs;
  });
  EXPECT_EQ(calls, rank() == size() - 1 ? 12U : 0U);
}

}  // namespace
}  // namespace reef
