// What is planned is as fast as what a search of all cuts, names and depths finds, and never over a rank's
// bytes.
#include "reef/plan_pipeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "reef/error.h"
#include "reef/pipeline_generator.h"
#include "reef/pipeline_versions.h"
#include "support/config_error.h"
#include "support/pipelines.h"

namespace reef {
namespace {

using test::config_error;
using test::every_cuts;
using test::random_chain;

/// Gives bytes to a chain that fits into no less than some of its schedules need.
void give_bytes(std::mt19937_64& random, PipelineProfile& profile) {
  for (PipelineChunkCost& stage : profile.stages) {
    stage.kept_bytes = 100 + random() % 1000;
    stage.kept_after_input_bytes = stage.kept_bytes / 2;
    stage.working_bytes = random() % 300;
    stage.fixed_bytes = random() % 2000;
  }
}

std::uint64_t most_bytes(const PipelineCost& cost) {
  std::uint64_t most = 0;
  for (const PipelineRankCost& rank : cost.ranks) most = std::max(most, rank.peak_bytes);
  return most;
}

/// The least makespan over all cuts, and all schedules of one replica at depths up to 4, within the bytes.
double least_seconds(const PipelineProfile& profile, std::uint32_t ranks, std::uint32_t micro_batches,
                     std::uint64_t bytes) {
  double least = std::numeric_limits<double>::infinity();
  for (const PipelineGenerator& row : pipeline_generators()) {
    if (!row.synchronous || row.name == "chimera" || row.name == "dualpipe") continue;
    for (const std::uint32_t v : {1U, 2U}) {
      for (const std::uint32_t hop : {1U, 2U, 3U, 4U}) {
        PipelineSchedule schedule;
        const PipelineShape shape{ranks, micro_batches, v, {hop}};
        if (!config_error([&] { schedule = pipeline_schedule(row.name, shape); }).empty()) continue;
        if (schedule.chunks() > profile.stages.size()) continue;
        for (const PipelineCuts& cuts :
             every_cuts(static_cast<std::uint32_t>(profile.stages.size()), schedule.chunks())) {
          const PipelineCost cost = simulate(cut_costs(profile, cuts), schedule);
          if (most_bytes(cost) <= bytes) least = std::min(least, cost.makespan_seconds);
        }
        if (row.name != "1f1b" && row.name != "zero_bubble") break;  // the others have no hops
      }
    }
  }
  return least;
}

TEST(PlanPipeline, HasHardlyAnyRegret) {
  std::mt19937_64 random(17);
  double sum = 0, worst = 0;
  constexpr int kChains = 25;
  for (int i = 0; i < kChains; ++i) {
    const auto stages = static_cast<std::uint32_t>(5 + random() % 6),
               ranks = static_cast<std::uint32_t>(2 + random() % 3);
    const std::uint32_t micro_batches = ranks * (1U << random() % 3);
    const PipelineProfile profile = random_chain(random, stages);
    const double seconds = plan_pipeline(profile, ranks, {micro_batches}).cost.makespan_seconds;
    const double least =
        least_seconds(profile, ranks, micro_batches, std::numeric_limits<std::uint64_t>::max());
    const double regret = seconds / least - 1;  // below 0 where only a greedy schedule is as good
    sum += std::max(0.0, regret);
    worst = std::max(worst, regret);
  }
  EXPECT_LE(sum / kChains, 0.01) << "worst " << worst;
}

/// The least makespan over all cuts, all numbers of ranks for each chunk, and all schedules that take them at
/// depths up to 4.
double least_seconds_of_divisions(const PipelineProfile& profile, std::uint32_t ranks,
                                  std::uint32_t micro_batches) {
  double least = std::numeric_limits<double>::infinity();
  for (const std::vector<std::uint32_t>& each : test::every_ranks_per_chunk(ranks)) {
    if (each.size() > profile.stages.size()) continue;
    const auto chunks = static_cast<std::uint32_t>(each.size());
    for (const char* name : {"gpipe", "1f1b", "zero_bubble"}) {
      for (const std::uint32_t hop : {1U, 2U, 3U, 4U}) {
        const PipelineSchedule schedule = pipeline_schedule(
            name, {.ranks = ranks, .micro_batches = micro_batches, .hops = {hop}, .ranks_per_chunk = each});
        for (const PipelineCuts& cuts : every_cuts(static_cast<std::uint32_t>(profile.stages.size()), chunks))
          least = std::min(least, simulate(cut_costs(profile, cuts), schedule).makespan_seconds);
      }
    }
  }
  return least;
}

TEST(PlanPipeline, HasHardlyAnyRegretWhereChunksMayHaveSeveralRanks) {
  std::mt19937_64 random(29);
  double sum = 0, worst = 0;
  int with_several = 0;
  constexpr int kChains = 25;
  for (int i = 0; i < kChains; ++i) {
    const auto stages = static_cast<std::uint32_t>(1 + random() % 6),
               ranks = static_cast<std::uint32_t>(2 + random() % 3);
    const std::uint32_t micro_batches = ranks * (1U << random() % 3);
    PipelineProfile profile = random_chain(random, stages);
    for (PipelineChunkCost& stage : profile.stages) stage.gradient_bytes = random() % 100;
    const PipelinePlan plan =
        plan_pipeline(profile, ranks, {.micro_batches = micro_batches, .may_replicate = true});
    with_several += plan.schedule.rank_of.size() > 1 ? 1 : 0;
    const double least = least_seconds_of_divisions(profile, ranks, micro_batches);
    const double regret = plan.cost.makespan_seconds / least - 1;
    sum += std::max(0.0, regret);
    worst = std::max(worst, regret);
    if (stages < ranks) {
      EXPECT_NE(config_error([&] { plan_pipeline(profile, ranks, {micro_batches}); }).find("several ranks"),
                std::string::npos);
      continue;
    }
    EXPECT_LE(plan.cost.makespan_seconds,
              plan_pipeline(profile, ranks, {micro_batches}).cost.makespan_seconds);
  }
  EXPECT_LE(sum / kChains, 0.01) << "worst " << worst;
  EXPECT_GT(with_several, 5);
}

TEST(PlanPipeline, RanksOfAChunkKeepToTheirBytes) {
  PipelineProfile profile;
  profile.stages.assign(3, {0.01, 0.01, 0.01, 1'000, 400'000, 400'000, 1'000, 2'000'000, 3'000});
  profile.stages[0].forward_seconds = 0.04;
  profile.links = {{0, 1e9, 0}};
  PipelinePlanOptions options{.micro_batches = 12, .may_recompute = true, .may_replicate = true};
  const PipelinePlan roomy = plan_pipeline(profile, 4, options);
  EXPECT_TRUE(roomy.cuts.empty()) << roomy.text();  // four replicas of the whole model
  EXPECT_NE(roomy.text().find("rank 3: stages 0 to the last"), std::string::npos) << roomy.text();
  bool recomputes = false;
  for (const std::uint64_t bytes : {5'300'000U, 4'100'000U, 3'600'000U, 3'000'000U, 2'600'000U}) {
    profile.rank_bytes.assign(4, bytes);
    const PipelinePlan plan = plan_pipeline(profile, 4, options);
    EXPECT_EQ(plan.schedule.rank_of.size(), 2U) << plan.text();
    EXPECT_NE(plan.text().find("rank 1: stages 0 to 0"), std::string::npos) << plan.text();
    for (const PipelineRankCost& rank : plan.cost.ranks) EXPECT_LE(rank.peak_bytes, bytes);
    EXPECT_EQ(simulate(cut_costs(profile, plan.cuts, plan.recomputed), plan.schedule).makespan_seconds,
              plan.cost.makespan_seconds);
    recomputes = recomputes || !plan.recomputed.empty();
  }
  EXPECT_TRUE(recomputes);
  profile.rank_bytes.assign(4, 1'000'000);
  EXPECT_THROW(plan_pipeline(profile, 4, options), BudgetError);
}

TEST(PlanPipeline, KeepsToEachRanksBytesAndMoreAreNeverSlower) {
  std::mt19937_64 random(19);
  for (int i = 0; i < 20; ++i) {
    const auto stages = static_cast<std::uint32_t>(4 + random() % 7),
               ranks = static_cast<std::uint32_t>(2 + random() % 3);
    const std::uint32_t micro_batches = static_cast<std::uint32_t>(1 + random() % 12);
    PipelineProfile profile = random_chain(random, stages);
    give_bytes(random, profile);
    const PipelinePlan all = plan_pipeline(profile, ranks, {micro_batches});
    double before = all.cost.makespan_seconds;
    std::uint64_t bytes = most_bytes(all.cost);
    for (bool fits = true; fits; bytes = bytes * 9 / 10) {
      profile.rank_bytes.assign(ranks, bytes);
      try {
        const PipelinePlan plan = plan_pipeline(profile, ranks, {micro_batches});
        EXPECT_LE(most_bytes(plan.cost), bytes);
        EXPECT_GE(plan.cost.makespan_seconds, before * (1 - 1e-9));
        const PipelineCost again = simulate(cut_costs(profile, plan.cuts), plan.schedule);
        EXPECT_EQ(again.makespan_seconds, plan.cost.makespan_seconds);
        before = plan.cost.makespan_seconds;
      } catch (const BudgetError& error) {
        fits = false;
        EXPECT_NE(std::string(error.what()).find("bytes are missing"), std::string::npos) << error.what();
        EXPECT_GT(error.smallest_budget_bytes(), bytes);
        // What it names as needed is enough.
        profile.rank_bytes.assign(ranks, error.smallest_budget_bytes());
        EXPECT_NO_THROW(plan_pipeline(profile, ranks, {micro_batches}));
      }
    }
  }
}

TEST(PlanPipeline, RecomputesWhereThatIsFaster) {
  PipelineProfile profile;
  profile.stages.assign(8, {0.01, 0.01, 0.01, 1'000, 1'000'000, 1'000'000, 1'000, 10'000});
  profile.rank_bytes.assign(4, 2'400'000);  // the graphs of one pass of two stages, and little more
  const PipelinePlan keeps = plan_pipeline(profile, 4, {.micro_batches = 16});
  const PipelinePlan plan = plan_pipeline(profile, 4, {.micro_batches = 16, .may_recompute = true});
  EXPECT_TRUE(keeps.recomputed.empty());
  EXPECT_FALSE(plan.recomputed.empty());
  EXPECT_LT(plan.cost.makespan_seconds, 0.9 * keeps.cost.makespan_seconds);
  EXPECT_NE(plan.text().find("4 ranks, recomputing: "), std::string::npos) << plan.text();
  for (const PipelineRankCost& rank : plan.cost.ranks) EXPECT_LE(rank.peak_bytes, 2'400'000U);
  EXPECT_NE(plan.text().find(", recomputes "), std::string::npos) << plan.text();
  EXPECT_EQ(simulate(cut_costs(profile, plan.cuts, plan.recomputed), plan.schedule).makespan_seconds,
            plan.cost.makespan_seconds);
  profile.rank_bytes.clear();
  const PipelinePlan roomy = plan_pipeline(profile, 4, {.micro_batches = 16, .may_recompute = true});
  EXPECT_TRUE(roomy.recomputed.empty());
  EXPECT_EQ(roomy.cost.makespan_seconds,
            plan_pipeline(profile, 4, {.micro_batches = 16}).cost.makespan_seconds);
  EXPECT_LT(roomy.cost.makespan_seconds, plan.cost.makespan_seconds);
}

TEST(PlanPipeline, IsNeverSlowerThanANamedSchedule) {
  std::mt19937_64 random(23);
  for (int i = 0; i < 10; ++i) {
    const PipelineProfile profile = random_chain(random, 9);
    const PipelinePlan any = plan_pipeline(profile, 4, {8});
    for (const char* name : {"gpipe", "1f1b", "zero_bubble", "interleaved", "interleaved_zero_bubble",
                             "breadth_first", "zbv", "v_half", "v_min", "dualpipev", "greedy"}) {
      const PipelinePlan named = plan_pipeline(profile, 4, {.micro_batches = 8, .schedules = {name}});
      EXPECT_EQ(named.schedule.name, name);
      EXPECT_LE(any.cost.makespan_seconds, named.cost.makespan_seconds) << name;
    }
    const PipelinePlan whole = plan_pipeline(profile, 4, {.micro_batches = 8, .may_split = false});
    EXPECT_EQ(whole.schedule.text().find('I'), std::string::npos);
  }
}

// Figures of the notes: what is chosen behind slow links against 1F1B and the best schedule that torch has.
TEST(PlanPipeline, SlowLinksAreHidden) {
  PipelineProfile profile;
  profile.stages.assign(8, {1, 1, 1, 2});
  for (const auto& [bytes_per_second, least_gain] :
       std::vector<std::pair<double, double>>{{1, 1.5}, {0.5, 1.9}}) {
    profile.links = {{0, bytes_per_second, 0}};
    const double chosen = plan_pipeline(profile, 4, {16}).cost.makespan_seconds;
    const double plain =
        simulate(cut_costs(profile, {2, 4, 6}), pipeline_schedule("1f1b", {4, 16})).makespan_seconds;
    EXPECT_GE(plain / chosen, least_gain);
  }
}

TEST(PlanPipeline, OrdersRanksThatDiffer) {
  PipelineProfile profile;
  profile.stages.assign(3, {1, 1, 1, 1});
  profile.stages[1].forward_seconds = 10;
  profile.speeds = {8, 1, 1};  // the fast rank is given what takes longest
  const PipelinePlan plan = plan_pipeline(profile, 3, {8});
  EXPECT_EQ(plan.schedule.rank_of.front()[1], 0U);
  // Ranks 0 and 2 have no link between them to speak of, so they are not neighbours.
  profile.speeds.clear();
  profile.stages[1].forward_seconds = 1;
  profile.links.assign(9, {0, 1000, 0});
  profile.links[2] = profile.links[6] = {50, 1, 0};
  const PipelinePlan linked = plan_pipeline(profile, 3, {8});
  EXPECT_EQ(linked.schedule.rank_of.front()[1], 1U);
}

/// The least makespan of four batches over all cuts, by an asynchronous schedule at depths up to 4.
double least_seconds_without_barrier(const PipelineProfile& profile, const char* name, std::uint32_t ranks,
                                     std::uint32_t micro_batches) {
  double least = std::numeric_limits<double>::infinity();
  for (const std::uint32_t hop : {1U, 2U, 3U, 4U}) {
    PipelineSchedule schedule;
    const std::string refused = config_error([&] {
      schedule = pipeline_schedule(name, {.ranks = ranks,
                                          .micro_batches = 4 * micro_batches,
                                          .hops = {hop},
                                          .micro_batches_per_update = micro_batches});
    });
    if (!refused.empty()) continue;
    for (const PipelineCuts& cuts : every_cuts(static_cast<std::uint32_t>(profile.stages.size()), ranks))
      least = std::min(least, simulate(cut_costs(profile, cuts), schedule).makespan_seconds);
  }
  return least;
}

TEST(PlanPipeline, AsynchronousSchedulesArePlannedByTheirNames) {
  std::mt19937_64 random(31);
  double sum = 0;
  int plans = 0;
  for (const char* name : {"pipedream", "pipedream_vertical", "pipedream_2bw", "pipemare", "hetpipe"}) {
    for (int i = 0; i < 5; ++i) {
      const auto stages = static_cast<std::uint32_t>(4 + random() % 5),
                 ranks = static_cast<std::uint32_t>(2 + random() % 3);
      const std::uint32_t micro_batches = 2 * ranks;
      PipelineProfile profile = random_chain(random, stages);
      give_bytes(random, profile);
      const PipelinePlanOptions options{.micro_batches = micro_batches, .schedules = {name}};
      const PipelinePlan plan = plan_pipeline(profile, ranks, options);
      EXPECT_EQ(plan.schedule.name, name);
      EXPECT_EQ(plan.schedule.micro_batches, 4 * micro_batches);
      ASSERT_EQ(plan.hops.size(), ranks - 1);
      const double least = least_seconds_without_barrier(profile, name, ranks, micro_batches);
      sum += std::max(0.0, plan.cost.makespan_seconds / least - 1);
      ++plans;
      // Versions of weights take bytes.
      for (PipelineChunkCost& stage : profile.stages) stage.gradient_bytes = 100'000;
      const PipelinePlan counted = plan_pipeline(profile, ranks, options);
      const std::vector<std::uint32_t> alive = pipeline_versions(counted.schedule).most_alive;
      const PipelineCost without = simulate(counted.costs, counted.schedule);
      PipelineCosts no_weights = counted.costs;
      for (PipelineChunkCost& chunk : no_weights.chunks) chunk.gradient_bytes = 0;
      for (std::uint32_t rank = 0; rank < ranks; ++rank)
        EXPECT_EQ(without.ranks[rank].peak_bytes,
                  simulate(no_weights, counted.schedule).ranks[rank].peak_bytes +
                      (alive[rank] - 1) * counted.costs.chunks[rank].gradient_bytes);
      // Fewer bytes than several versions take leave less deep ones, or none.
      profile.rank_bytes.assign(ranks, most_bytes(without) - 1);
      try {
        const PipelinePlan less = plan_pipeline(profile, ranks, options);
        EXPECT_LT(most_bytes(less.cost), most_bytes(without));
      } catch (const BudgetError&) {
      }
    }
  }
  EXPECT_LE(sum / plans, 0.01);
}

TEST(PlanPipeline, SchedulesOfTwoDirectionsMayBePlanned) {
  PipelineProfile profile;
  profile.stages.assign(4, {0.01, 0.01, 0.01, 0, 100, 100, 10, 1000, 500});
  for (const char* name : {"chimera", "dualpipe"}) {
    const PipelinePlanOptions options{.micro_batches = 8, .may_replicate = true, .schedules = {name}};
    const PipelinePlan plan = plan_pipeline(profile, 4, options);
    EXPECT_EQ(plan.schedule.name, name);
    EXPECT_EQ(plan.schedule.rank_of.size(), 2U);
    profile.rank_bytes.assign(4, most_bytes(plan.cost) - 1);
    EXPECT_THROW(plan_pipeline(profile, 4, options), BudgetError);
    PipelinePlanOptions again = options;
    again.may_recompute = true;
    EXPECT_FALSE(plan_pipeline(profile, 4, again).recomputed.empty());
    profile.rank_bytes.clear();
  }
}

TEST(PlanPipeline, WhatCannotBePlannedIsRefused) {
  PipelineProfile profile;
  profile.stages.assign(4, {1, 1, 1, 1});
  const auto refused = [&](std::uint32_t ranks, const PipelinePlanOptions& options) {
    return config_error([&] { plan_pipeline(profile, ranks, options); });
  };
  EXPECT_NE(refused(5, {4}).find("4 stages cannot be cut for 5 ranks"), std::string::npos);
  EXPECT_NE(refused(0, {4}).find("no rank"), std::string::npos);
  EXPECT_NE(refused(2, {0}).find("no micro-batch"), std::string::npos);
  EXPECT_NE(refused(2, {.micro_batches = 4, .schedules = {"fastest"}}).find("none of the schedules"),
            std::string::npos);
  EXPECT_NE(refused(2, {.micro_batches = 4, .schedules = {"chimera"}}).find("let the plan replicate"),
            std::string::npos);
  EXPECT_NE(refused(2, {.micro_batches = 4, .schedules = {"1f1b", "pipedream"}}).find("train differently"),
            std::string::npos);
  EXPECT_NE(refused(4, {.micro_batches = 1, .schedules = {"hetpipe"}}).find("none of the schedules takes"),
            std::string::npos);
  EXPECT_NE(refused(4, {.micro_batches = 4, .schedules = {"zbv"}}).find("none of the schedules takes"),
            std::string::npos);
  profile.rank_bytes = {1};
  EXPECT_NE(refused(2, {4}).find("the bytes of 1 ranks"), std::string::npos);
  profile.rank_bytes.clear();
  profile.speeds = {1, -1};
  EXPECT_NE(refused(2, {4}).find("rank 1 has a speed"), std::string::npos);
}

TEST(PlanPipeline, TextSaysWhatWasChosen) {
  PipelineProfile profile;
  profile.stages.assign(4, {0.25, 0.25, 0.25, 1});
  const std::string text = plan_pipeline(profile, 2, {.micro_batches = 4, .schedules = {"1f1b"}}).text();
  EXPECT_EQ(text,
            "1f1b of 4 micro-batches over 2 ranks: 7.50 s, idle 20.0 %\n"
            "rank 0: stages 0 to 1, busy 6.00 s, at most 2 passes in flight, 3 B\n"
            "rank 1: stages 2 to the last, busy 6.00 s, at most 1 passes in flight, 4 B\n");
}

}  // namespace
}  // namespace reef
