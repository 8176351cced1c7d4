// The best cuts are those that a search of all cuts finds, for each objective; and which objective predicts a
// pipeline best.
#include "reef/pipeline_partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "reef/pipeline_generator.h"
#include "support/config_error.h"
#include "support/pipelines.h"

namespace reef {
namespace {

using test::config_error;
using test::every_cuts;
using test::random_chain;

std::vector<std::uint32_t> straight(std::uint32_t chunks) {
  std::vector<std::uint32_t> ranks(chunks);
  std::iota(ranks.begin(), ranks.end(), 0U);
  return ranks;
}

TEST(PipelinePartition, TheBestCutsAreThoseOfASearchOfAll) {
  std::mt19937_64 random(5);
  for (const PipelineObjective objective : kPipelineObjectives) {
    for (int i = 0; i < 150; ++i) {
      const auto draw = [&](std::uint32_t least, std::uint32_t most) {
        return least + static_cast<std::uint32_t>(random() % (most - least + 1));
      };
      const std::uint32_t stages = draw(1, 9), chunks = draw(1, std::min(stages, 5U)),
                          ranks = draw(1, chunks);
      PipelineProfile profile = random_chain(random, stages);
      std::vector<std::uint32_t> rank_of;
      for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) rank_of.push_back(chunk % ranks);
      for (std::uint32_t rank = 0; rank < ranks; ++rank) profile.speeds.push_back(draw(1, 3));
      profile.links.clear();
      for (std::uint32_t pair = 0; pair < ranks * ranks; ++pair)
        profile.links.push_back({0.1 * draw(0, 3), 1.0 * draw(1, 8), 0.0});
      const std::uint32_t micro_batches = draw(1, 16);

      std::vector<double> values;
      for (const PipelineCuts& cuts : every_cuts(stages, chunks))
        values.push_back(objective_seconds(objective, profile, cuts, rank_of, micro_batches));
      std::sort(values.begin(), values.end());
      const std::size_t count = std::min<std::size_t>(values.size(), 7);
      const std::vector<PipelineCuts> found = best_cuts(objective, profile, rank_of, micro_batches, count);
      ASSERT_EQ(found.size(), count);
      for (std::size_t k = 0; k < count; ++k)
        EXPECT_NEAR(objective_seconds(objective, profile, found[k], rank_of, micro_batches), values[k], 1e-9)
            << name(objective) << ", number " << k;
    }
  }
}

// By hand: two chunks of 3 and 6 s, and a message of 1 s one way.
TEST(PipelinePartition, ObjectivesAreTheirFormulas) {
  PipelineProfile profile;
  profile.stages = {{1, 1, 1, 4}, {2, 2, 2, 9}};
  profile.links = {{0.5, 8, 0}};
  const std::vector<std::uint32_t> ranks = {0, 1};
  const auto seconds = [&](PipelineObjective objective) {
    return objective_seconds(objective, profile, {1}, ranks, 4);
  };
  EXPECT_EQ(seconds(PipelineObjective::kPipeDream), 6);
  EXPECT_EQ(seconds(PipelineObjective::kPipeTorch), 8);
  EXPECT_EQ(seconds(PipelineObjective::kSumAndMax), 3 + 2 + 6 + 3 * 6);
  EXPECT_EQ(seconds(PipelineObjective::kDapple), 3 + 2 + 6 + 3 * 6);  // the pivot is the last chunk
  profile.speeds = {0.25, 1};
  EXPECT_EQ(seconds(PipelineObjective::kPipeDream), 12);
  EXPECT_EQ(seconds(PipelineObjective::kDapple), 12 + 3 * 12);  // the pivot is the first one
  EXPECT_EQ(seconds(PipelineObjective::kSumAndMax), 12 + 2 + 6 + 3 * 12);
}

TEST(PipelinePartition, TheBestDivisionsAreThoseOfASearchOfAll) {
  std::mt19937_64 random(7);
  for (const PipelineObjective objective : kPipelineObjectives) {
    for (int i = 0; i < 60; ++i) {
      const auto draw = [&](std::uint32_t least, std::uint32_t most) {
        return least + static_cast<std::uint32_t>(random() % (most - least + 1));
      };
      const std::uint32_t stages = draw(1, 8), ranks = draw(1, 5), micro_batches = draw(1, 16);
      PipelineProfile profile = random_chain(random, stages);
      for (PipelineChunkCost& stage : profile.stages) stage.gradient_bytes = draw(0, 300);
      for (std::uint32_t rank = 0; rank < ranks; ++rank) profile.speeds.push_back(draw(1, 3));
      profile.links.clear();
      for (std::uint32_t pair = 0; pair < ranks * ranks; ++pair)
        profile.links.push_back({0.1 * draw(0, 3), 1.0 * draw(1, 8), 0.0});
      std::vector<std::uint32_t> order = straight(ranks);
      std::shuffle(order.begin(), order.end(), random);

      std::vector<double> values;
      for (const std::vector<std::uint32_t>& each : test::every_ranks_per_chunk(ranks)) {
        if (each.size() > stages || *std::max_element(each.begin(), each.end()) > micro_batches) continue;
        for (const PipelineCuts& cuts : every_cuts(stages, static_cast<std::uint32_t>(each.size())))
          values.push_back(
              objective_seconds(objective, profile, PipelineDivision{cuts, each}, order, micro_batches));
      }
      std::sort(values.begin(), values.end());
      const std::size_t count = std::min<std::size_t>(values.size(), 7);
      const std::vector<PipelineDivision> found =
          best_divisions(objective, profile, order, micro_batches, count);
      ASSERT_EQ(found.size(), count);
      for (std::size_t k = 0; k < count; ++k) {
        EXPECT_NEAR(objective_seconds(objective, profile, found[k], order, micro_batches), values[k], 1e-9)
            << name(objective) << ", number " << k;
        EXPECT_NEAR(found[k].seconds, values[k], 1e-9) << name(objective) << ", number " << k;
      }
    }
  }
}

// By hand: a chunk of 3 s on one rank, and one of 12 s, 4 of them forward, on two that add up 8 bytes of
// gradients: each sends 4 bytes and takes 4 back. A message of 4 bytes takes 1 s, one way.
TEST(PipelinePartition, ObjectivesOfSeveralRanksAreTheirFormulas) {
  PipelineProfile profile;
  profile.stages = {{.forward_seconds = 1, .input_seconds = 1, .weight_seconds = 1, .output_bytes = 4},
                    {.forward_seconds = 4, .input_seconds = 4, .weight_seconds = 4, .output_bytes = 9}};
  profile.stages[1].gradient_bytes = 8;
  profile.links = {{0.5, 8, 0}};
  const std::vector<std::uint32_t> order = {2, 0, 1};
  const PipelineDivision division{{1}, {1, 2}};
  const auto seconds = [&](PipelineObjective objective, std::uint32_t micro_batches) {
    return objective_seconds(objective, profile, division, order, micro_batches);
  };
  EXPECT_EQ(seconds(PipelineObjective::kPipeDream, 4), 6);  // 12 / 2
  EXPECT_EQ(seconds(PipelineObjective::kPipeTorch, 4), (12 + 2.0) / 2);
  // The pivot is the second chunk; its ranks add up when all have ended but the B of the first one and its
  // message.
  EXPECT_EQ(seconds(PipelineObjective::kDapple, 4), 3 + 2 + 6 + 3 * 6 + std::max(0.0, 2 - (2 + 1.0)));
  EXPECT_EQ(seconds(PipelineObjective::kSumAndMax, 4), 3 + 2 + 12 + (2 - 1) * 12 + 2);
  EXPECT_EQ(seconds(PipelineObjective::kSumAndMax, 5), 3 + 2 + 12 + (3 - 1) * 12 + 2);
  profile.stages[1].gradient_bytes = 800;  // 2 * (400 / 8 + 0.5)
  EXPECT_EQ(seconds(PipelineObjective::kPipeDream, 4), 101.0 / 4);
  EXPECT_EQ(seconds(PipelineObjective::kDapple, 4), 3 + 2 + 6 + 3 * 6 + 101 - (2 + 1));
  EXPECT_EQ(seconds(PipelineObjective::kSumAndMax, 4), 3 + 2 + 12 + (2 - 1) * 12 + 101);
  const PipelineCost cost =
      simulate(cut_costs(profile, {1}),
               pipeline_schedule("1f1b", {.ranks = 3, .micro_batches = 4, .ranks_per_chunk = {1, 2}}));
  EXPECT_EQ(cost.reduction_seconds, 101);
  double end = 0;
  for (const PipelineRankCost& rank : cost.ranks) end = std::max(end, rank.end_seconds);
  EXPECT_EQ(cost.makespan_seconds, end + 101);
}

TEST(PipelinePartition, DivisionsThatAreNoneAreRefused) {
  PipelineProfile profile;
  profile.stages.resize(4);
  const std::vector<std::uint32_t> three = straight(3);
  const auto refused = [&](const PipelineDivision& division) {
    return config_error(
        [&] { objective_seconds(PipelineObjective::kPipeDream, profile, division, three, 4); });
  };
  for (const PipelineDivision& division :
       std::vector<PipelineDivision>{{{2}, {1, 1}}, {{2}, {3}}, {{2}, {3, 0}}, {{1, 2}, {2, 2, 1}}})
    EXPECT_NE(refused(division).find("give each chunk one at least"), std::string::npos);
  EXPECT_NE(refused({{5}, {1, 2}}).find("give ascending stages from 1"), std::string::npos);
  for (const auto& [ranks, micro_batches] :
       std::vector<std::pair<std::uint32_t, std::uint32_t>>{{0, 4}, {3, 0}})
    EXPECT_NE(config_error([&, of = straight(ranks), m = micro_batches] {
                best_divisions(PipelineObjective::kPipeDream, profile, of, m, 1);
              }).find("give at least one of each"),
              std::string::npos);
}

TEST(PipelinePartition, ChunksAddUpTheirStages) {
  PipelineProfile profile;
  profile.stages = {{1, 2, 3, 10, 100, 50, 7, 1000, 300},
                    {2, 3, 4, 20, 200, 60, 9, 2000, 400},
                    {3, 4, 5, 30, 300, 70, 8, 3000, 500}};
  const PipelineCosts costs = cut_costs(profile, {2});
  ASSERT_EQ(costs.chunks.size(), 2U);
  const PipelineChunkCost& first = costs.chunks.front();
  EXPECT_EQ(first.forward_seconds, 3);
  EXPECT_EQ(first.input_seconds, 0);  // nobody waits for it
  EXPECT_EQ(first.weight_seconds, 5 + 7);
  EXPECT_EQ(first.output_bytes, 20U);
  EXPECT_EQ(first.kept_bytes, 300U);
  EXPECT_EQ(first.kept_after_input_bytes, 300U);
  EXPECT_EQ(first.working_bytes, 9U);
  EXPECT_EQ(first.fixed_bytes, 3000U);
  EXPECT_EQ(first.gradient_bytes, 700U);
  const PipelineChunkCost& second = costs.chunks.back();
  EXPECT_EQ(second.output_bytes, 30U);
  EXPECT_EQ(second.input_seconds, 4);
  EXPECT_EQ(second.weight_seconds, 5);
  EXPECT_EQ(second.kept_after_input_bytes, 70U);
  const PipelineCosts again = cut_costs(profile, {2}, whole_chunks(3, {2}));
  const PipelineChunkCost &alone = again.chunks.front(), &given = again.chunks.back();
  EXPECT_EQ(alone.kept_bytes, 0U);  // the batch is the program's
  EXPECT_EQ(alone.kept_after_input_bytes, 0U);
  EXPECT_EQ(alone.working_bytes, 9U + 300U);
  EXPECT_EQ(alone.weight_seconds, 5 + 7 + 3);
  EXPECT_EQ(given.kept_bytes, 20U);
  EXPECT_EQ(given.kept_after_input_bytes, 70U);
  EXPECT_EQ(given.working_bytes, 8U + 300U);
  EXPECT_EQ(given.input_seconds, 4 + 3);
  EXPECT_EQ(given.weight_seconds, 5);
}

TEST(PipelinePartition, SkipsAreBetweenTheChunksOfTheirStages) {
  PipelineProfile profile;
  profile.stages.assign(6, {1, 1, 1, 8, 100, 50, 7, 1000});
  profile.skips = {{0, {1, 5}, 3}, {1, {2, 3, 4}, 5}, {4, {5}, 7}};
  const auto skips = [&](const PipelineCuts& cuts) { return cut_costs(profile, cuts).skips; };
  EXPECT_EQ(skips({}), std::vector<PipelineSkip>{});
  EXPECT_EQ(skips({3}), (std::vector<PipelineSkip>{{0, {1}, 3}, {0, {1}, 5}}));
  EXPECT_EQ(skips({1, 3, 5}), (std::vector<PipelineSkip>{{0, {1, 3}, 3}, {1, {2}, 5}, {2, {3}, 7}}));
  EXPECT_EQ(skips({1, 2, 3, 4, 5}), profile.skips);
  const PipelineCosts again = cut_costs(profile, {1, 3, 5}, whole_chunks(6, {1, 3, 5}));
  EXPECT_EQ(again.chunks[1].kept_bytes, 8U + 3U);
  EXPECT_EQ(again.chunks[2].kept_bytes, 8U + 5U);
  EXPECT_EQ(again.chunks[3].kept_bytes, 8U + 3U + 7U);
  using Skips = std::vector<PipelineSkip>;
  for (const Skips& wrong :
       {Skips{{0, {}}}, Skips{{2, {2}}}, Skips{{3, {1}}}, Skips{{0, {6}}}, Skips{{0, {3, 3}}}}) {
    profile.skips = wrong;
    EXPECT_NE(config_error([&] { cut_costs(profile, {1}); }).find("PipelineSkip 0 is from"),
              std::string::npos);
    EXPECT_NE(config_error([&] {
                pipeline_messages(pipeline_schedule("gpipe", {6, 1}), wrong);
              }).find("PipelineSkip 0"),
              std::string::npos);
  }
}

TEST(PipelinePartition, CutsThatAreNoneAreRefused) {
  PipelineProfile profile;
  profile.stages.resize(4);
  for (const PipelineCuts& cuts : std::vector<PipelineCuts>{{0}, {4}, {2, 2}, {3, 1}})
    EXPECT_NE(config_error([&] { cut_costs(profile, cuts); }).find("give ascending stages from 1"),
              std::string::npos);
  const std::vector<std::uint32_t> two = straight(2), five = straight(5);
  const auto objective = PipelineObjective::kSumAndMax;
  EXPECT_NE(config_error([&] {
              objective_seconds(objective, profile, {1, 2}, two, 4);
            }).find("3 chunks are placed on 2"),
            std::string::npos);
  EXPECT_NE(
      config_error([&] { best_cuts(objective, profile, five, 4, 1); }).find("4 stages cannot be cut into 5"),
      std::string::npos);
  EXPECT_NE(config_error([] { cut_costs({}, {}); }).find("without a stage"), std::string::npos);
  profile.speeds = {1};
  EXPECT_NE(config_error([&] { best_cuts(objective, profile, two, 4, 1); }).find("a chunk is on rank 1"),
            std::string::npos);
  profile.speeds = {1, 0};
  EXPECT_NE(
      config_error([&] { objective_seconds(objective, profile, {1}, two, 4); }).find("rank 1 has a speed"),
      std::string::npos);
  profile.speeds.clear();
  profile.links.assign(3, {0, 1, 0});
  EXPECT_NE(config_error([&] { best_cuts(objective, profile, two, 4, 1); }).find("3 links between 2 ranks"),
            std::string::npos);
}

/// How much slower 1F1B is with the cuts that an objective finds than with the best of all cuts, on average.
double mean_regret(PipelineObjective objective, std::size_t count) {
  std::mt19937_64 random(11);
  double sum = 0;
  constexpr int kChains = 120;
  for (int i = 0; i < kChains; ++i) {
    const auto stages = static_cast<std::uint32_t>(5 + random() % 5),
               ranks = static_cast<std::uint32_t>(2 + random() % 3);
    const std::uint32_t micro_batches = ranks * (1U << random() % 3);
    const PipelineProfile profile = random_chain(random, stages);
    const PipelineSchedule schedule = pipeline_schedule("1f1b", {ranks, micro_batches});
    const auto seconds = [&](const PipelineCuts& cuts) {
      return simulate(cut_costs(profile, cuts), schedule).makespan_seconds;
    };
    double least = 1e9, found = 1e9;
    for (const PipelineCuts& cuts : every_cuts(stages, ranks)) least = std::min(least, seconds(cuts));
    for (const PipelineCuts& cuts : best_cuts(objective, profile, straight(ranks), micro_batches, count))
      found = std::min(found, seconds(cuts));
    sum += found / least - 1;
  }
  return sum / kChains;
}

TEST(PipelinePartition, SixteenCutsOfSumAndMaxHoldTheBestOne) {
  EXPECT_LT(mean_regret(PipelineObjective::kSumAndMax, 16), 0.001);
  const double one = mean_regret(PipelineObjective::kSumAndMax, 1);
  EXPECT_GT(one, 0.001);
  for (const PipelineObjective other : {PipelineObjective::kPipeDream, PipelineObjective::kPipeTorch})
    EXPECT_LT(one, mean_regret(other, 1)) << name(other);
}

}  // namespace
}  // namespace reef
