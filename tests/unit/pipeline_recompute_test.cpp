// The choice of recomputed stages, against all possible choices.
#include "pipeline/recompute.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "reef/error.h"
#include "reef/pipeline_generator.h"
#include "reef/plan_pipeline.h"
#include "support/config_error.h"

namespace reef {
namespace {

using test::config_error;

PipelineProfile random_chain(std::mt19937_64& random, std::uint32_t stages) {
  const auto draw = [&](std::uint64_t least, std::uint64_t most) {
    return least + random() % (most - least + 1);
  };
  PipelineProfile profile;
  for (std::uint32_t i = 0; i < stages; ++i) {
    PipelineChunkCost stage;
    stage.forward_seconds = static_cast<double>(draw(1, 64)) / 64;
    stage.input_seconds = static_cast<double>(draw(1, 64)) / 64;
    stage.weight_seconds = static_cast<double>(draw(1, 64)) / 64;
    stage.output_bytes = draw(1, 40);
    stage.kept_bytes = draw(0, 400);
    stage.kept_after_input_bytes = stage.kept_bytes;
    stage.working_bytes = draw(0, 50);
    profile.stages.push_back(stage);
  }
  if (random() % 2 == 0 && stages > 2) profile.skips = {{0, {stages - 2, stages - 1}, draw(1, 30)}};
  return profile;
}

/// Returns every way to divide the stages from `first` on into kept stages and recomputed runs.
std::vector<RecomputedRuns> all_runs(std::uint32_t first, std::uint32_t end) {
  if (first == end) return {{}};
  std::vector<RecomputedRuns> all = all_runs(first + 1, end);
  for (std::uint32_t next = first + 1; next <= end; ++next) {
    for (const RecomputedRuns& behind : all_runs(next, end)) {
      RecomputedRuns runs = {{first, next}};
      runs.insert(runs.end(), behind.begin(), behind.end());
      all.push_back(std::move(runs));
    }
  }
  return all;
}

TEST(PipelineRecompute, NoOtherRunsAreFasterInTheSameBytes) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 60; ++round) {
    const auto stages = static_cast<std::uint32_t>(2 + random() % 5);
    const PipelineProfile profile = random_chain(random, stages);
    const auto first = static_cast<std::uint32_t>(random() % 2);
    // What cut_costs() says of these runs, for the chunk of stages from `first` on.
    const PipelineCuts cuts = first == 0 ? PipelineCuts{} : PipelineCuts{first};
    const PipelineChunkCost plain = cut_costs(profile, cuts).chunks.back();
    const auto choice_of = [&](const RecomputedRuns& runs) {
      const PipelineChunkCost cost = cut_costs(profile, cuts, runs).chunks.back();
      const double again =
          cost.input_seconds + cost.weight_seconds - plain.input_seconds - plain.weight_seconds;
      return RecomputeChoice{runs, cost.kept_bytes, cost.working_bytes - plain.working_bytes, again};
    };
    const std::vector<RecomputeChoice> choices = recompute_choices(profile, first, stages);
    for (const RecomputeChoice& choice : choices) {
      const RecomputeChoice same = choice_of(choice.runs);
      ASSERT_EQ(choice.kept_bytes, same.kept_bytes);
      ASSERT_EQ(choice.run_bytes, same.run_bytes);
      ASSERT_EQ(choice.seconds, same.seconds);
    }
    std::vector<RecomputeChoice> all;
    for (const RecomputedRuns& runs : all_runs(first, stages)) all.push_back(choice_of(runs));
    for (const std::uint64_t in_flight : {1U, 3U, 8U}) {
      for (std::uint64_t bytes = 0; bytes < 12'000; bytes += 173) {
        const auto fastest = [&](const std::vector<RecomputeChoice>& of) {
          double seconds = std::numeric_limits<double>::infinity();
          for (const RecomputeChoice& each : of) {
            if (in_flight * each.kept_bytes + each.run_bytes <= bytes)
              seconds = std::min(seconds, each.seconds);
          }
          return seconds;
        };
        ASSERT_EQ(fastest(choices), fastest(all)) << in_flight << " " << bytes << ", round " << round;
      }
    }
  }
}

TEST(PipelineRecompute, PlansRecomputeAlmostAsLittleAsThereIsToRecompute) {
  std::mt19937_64 random(9);
  double regret = 0;
  int plans = 0, partial = 0;
  for (int round = 0; round < 40; ++round) {
    constexpr std::uint32_t kStages = 5, kMicroBatches = 6;
    PipelineProfile profile = random_chain(random, kStages);
    const PipelineSchedule schedule = pipeline_schedule("1f1b", {2, kMicroBatches});
    const auto peak = [&](const PipelineCost& cost) {
      return std::max(cost.ranks[0].peak_bytes, cost.ranks[1].peak_bytes);
    };
    const std::uint64_t natural = peak(simulate(cut_costs(profile, {2}), schedule));
    for (const std::uint64_t bytes : {natural / 2, natural * 3 / 4, natural * 9 / 10, natural}) {
      profile.rank_bytes.assign(2, bytes);
      double best = std::numeric_limits<double>::infinity();
      for (std::uint32_t cut = 1; cut < kStages; ++cut) {
        for (const RecomputedRuns& runs : all_runs(0, kStages)) {
          const PipelineCost cost = simulate(cut_costs(profile, {cut}, runs), schedule);
          if (peak(cost) <= bytes) best = std::min(best, cost.makespan_seconds);
        }
      }
      PipelinePlan plan;
      const PipelinePlanOptions options{
          .micro_batches = kMicroBatches, .may_recompute = true, .schedules = {"1f1b"}};
      try {
        plan = plan_pipeline(profile, 2, options);
      } catch (const BudgetError&) {
        continue;
      }
      EXPECT_LE(peak(plan.cost), bytes);
      EXPECT_EQ(simulate(cut_costs(profile, plan.cuts, plan.recomputed), plan.schedule).makespan_seconds,
                plan.cost.makespan_seconds);
      std::uint32_t again = 0;
      for (const RecomputedRun& run : plan.recomputed) again += run.end - run.first;
      partial += again > 0 && again < kStages ? 1 : 0;
      regret += std::max(0.0, plan.cost.makespan_seconds / best - 1);
      ++plans;
    }
  }
  EXPECT_GT(plans, 100);
  EXPECT_GT(partial, 30);
  EXPECT_LT(regret / plans, 0.01);
}

TEST(PipelineRecompute, RunsThatAreNoneAreRefused) {
  PipelineProfile profile;
  profile.stages.resize(4);
  for (const RecomputedRuns& runs :
       std::vector<RecomputedRuns>{{{0, 0}}, {{2, 1}}, {{3, 5}}, {{0, 2}, {1, 3}}, {{2, 3}, {0, 1}}})
    EXPECT_NE(config_error([&] { cut_costs(profile, {2}, runs); }).find("RecomputedRun: stages"),
              std::string::npos);
  EXPECT_EQ(whole_chunks(4, {1, 3}), (RecomputedRuns{{0, 1}, {1, 3}, {3, 4}}));
  EXPECT_EQ(runs_within({{0, 3}, {3, 4}}, {1, 4}), (RecomputedRuns{{1, 3}, {3, 4}}));
}

}  // namespace
}  // namespace reef
