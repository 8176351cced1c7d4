// What tests of pipelines share.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "messages.h"
#include "reef/pipeline.h"

namespace reef::pipeline_tests {

using at::Tensor;
using messages::config_error;
using messages::expect_words;
using messages::rank;
using messages::same;
using messages::size;
using messages::world;
using Tensors = PipelineStage::Tensors;

inline Tensor loss_of(const Tensor& output, std::uint32_t micro_batch) {
  return (output - 0.25 * (1 + micro_batch)).square().mean();
}

/// Returns the number of the chunk that has a stage.
inline std::uint32_t chunk_of(std::uint32_t stage, const PipelineCuts& cuts) {
  return static_cast<std::uint32_t>(std::upper_bound(cuts.begin(), cuts.end(), stage) - cuts.begin());
}

using Bits = std::map<std::string, Tensor>;
inline Bits gradients_of(const std::vector<std::pair<std::string, Tensor>>& named) {
  Bits bits;
  for (const auto& [name, parameter] : named)
    bits[name] = parameter.grad().defined() ? parameter.grad().clone() : Tensor();
  return bits;
}
inline std::vector<std::pair<std::string, Tensor>> named_of(const torch::nn::Sequential& modules) {
  std::vector<std::pair<std::string, Tensor>> named;
  for (const auto& each : modules->named_parameters()) named.emplace_back(each.key(), each.value());
  return named;
}

inline void expect_part_of(const Bits& all, const Pipeline& pipeline, const std::string& where) {
  for (const auto& [name, gradient] : gradients_of(pipeline.named_parameters())) {
    const Tensor& expected = all.at(name);
    ASSERT_EQ(gradient.defined(), expected.defined()) << name << where;
    EXPECT_TRUE(!gradient.defined() || same(gradient, expected)) << name << where;
  }
}

/// A schedule that replicas run, and what their ranks divide.
struct ReplicasRow {
  std::string schedule;
  std::uint32_t replicas = 1;
  std::uint32_t chunks_per_rank = 0;
  bool cut_alike = true;
  std::vector<std::uint32_t> ranks_per_chunk = {};
};
/// Some numbers of ranks for each chunk of a pipeline of so many ranks, with different schedules.
inline std::vector<ReplicasRow> rows_of_ranks_per_chunk(std::uint32_t ranks, std::uint32_t replicas) {
  std::vector<ReplicasRow> rows;
  const auto add = [&](const char* schedule, std::vector<std::uint32_t> ranks_per_chunk) {
    rows.push_back({schedule, replicas, 0, true, std::move(ranks_per_chunk)});
  };
  if (ranks == 2) add("zero_bubble", {2});
  if (ranks == 3) {
    add("1f1b", {2, 1});
    add("zero_bubble", {1, 2});
  }
  if (ranks == 4) {
    add("zero_bubble", {1, 3});
    add("1f1b", {2, 1, 1});
    add("gpipe", {2, 2});
  }
  return rows;
}
/// Cuts of each replica, of a model of so many stages into so many chunks: different ones, if there are
/// enough.
inline std::vector<PipelineCuts> different_cuts(std::uint32_t replicas, std::uint32_t chunks,
                                                std::uint32_t stages) {
  std::vector<PipelineCuts> all;
  for (std::uint32_t replica = 0; replica < replicas; ++replica) {
    PipelineCuts& cuts = all.emplace_back();
    for (std::uint32_t chunk = 1; chunk < chunks; ++chunk) {
      const std::uint32_t least = chunk == 1 ? 1 : cuts.back() + 1, most = stages - (chunks - chunk);
      cuts.push_back(std::min(most, least + (2 * replica + chunk - 1) % 4));
    }
  }
  return all;
}
inline PipelineOptions options_of(const ReplicasRow& row, Stage stage, std::uint32_t micro_batches,
                                  std::int64_t bucket_bytes) {
  PipelineOptions options{.micro_batches = micro_batches,
                          .schedule = row.schedule,
                          .chunks_per_rank = row.chunks_per_rank,
                          .ranks_per_chunk = row.ranks_per_chunk,
                          .replicas = row.replicas};
  options.shard.stage = stage;
  options.shard.bucket_bytes = bucket_bytes;
  return options;
}
inline std::string text_of(const ReplicasRow& row, Stage stage) {
  std::string each;
  for (const std::uint32_t ranks : row.ranks_per_chunk) each += " " + std::to_string(ranks);
  return " " + row.schedule + each + " x " + std::to_string(row.replicas) + ", stage " +
         std::to_string(static_cast<int>(stage)) + (row.cut_alike ? "" : ", cut differently");
}

/// A stage of several tensors: two that train, one of integers, one that is undefined, and one without a
/// gradient.
inline PipelineStage stage_of_many(std::uint32_t number) {
  torch::manual_seed(number);
  const Tensor weight = torch::randn({3, 3}).set_requires_grad(true);
  PipelineStage stage;
  stage.parameters = {{std::to_string(number) + ".weight", weight}};
  stage.run = [weight, number](const Tensors& given) -> Tensors {
    if (given.size() == 1) {
      return {given[0].mm(weight),          given[0].mm(weight.t()), at::full({2, 1}, 3, at::kInt), Tensor(),
              torch::ones({}, at::kDouble), at::zeros({0, 4})};
    }
    EXPECT_EQ(given.size(), 6U);
    EXPECT_FALSE(given[3].defined());
    EXPECT_EQ(given[2].scalar_type(), at::kInt);
    EXPECT_EQ(given[5].sizes(), (std::vector<std::int64_t>{0, 4}));
    const double scale = given[4].item<double>();
    Tensor second = number % 2 == 0 ? given[1] : given[1].detach();  // some gradients are not there
    return {given[0].mm(weight) * scale,           second,  given[2] + 1, given[3],
            given[4] + given[2].sum().item<int>(), given[5]};
  };
  return stage;
}

}  // namespace reef::pipeline_tests
