// The choice of recomputed stages, against all possible choices.
#include "pipeline/recompute.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/nested_runs.h"
#include "pipeline/recompute_choices.h"
#include "reef/chain_profile.h"
#include "reef/chain_solver.h"
#include "reef/error.h"
#include "reef/pipeline_generator.h"
#include "reef/plan_pipeline.h"
#include "support/config_error.h"

namespace reef {
namespace {

using test::config_error;

constexpr std::uint64_t kMostOutput = 40;

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
    stage.output_bytes = draw(1, kMostOutput);
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

/// Returns every way to recompute runs of the stages from `first` on, with runs within them. `whole`: but not
/// these stages as one run.
std::vector<RecomputedRuns> all_nested(std::uint32_t first, std::uint32_t end, bool whole = true) {
  if (first == end) return {{}};
  std::vector<RecomputedRuns> all = all_nested(first + 1, end);
  for (std::uint32_t next = first + 1; next <= end; ++next) {
    if (!whole && next == end) continue;
    for (const RecomputedRuns& within : all_nested(first, next, /*whole=*/false)) {
      for (const RecomputedRuns& behind : all_nested(next, end)) {
        RecomputedRuns runs = {{first, next}};
        runs.insert(runs.end(), within.begin(), within.end());
        runs.insert(runs.end(), behind.begin(), behind.end());
        all.push_back(std::move(runs));
      }
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
    std::vector<RecomputeChoice> all, every;
    for (const RecomputedRuns& runs : all_runs(first, stages)) all.push_back(choice_of(runs));
    for (const RecomputedRuns& runs : all_nested(first, stages)) every.push_back(choice_of(runs));
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
        ASSERT_GE(fastest(choices), fastest(every)) << in_flight << " " << bytes << ", round " << round;
        ASSERT_LE(fastest(choices), fastest(all)) << in_flight << " " << bytes << ", round " << round;
      }
    }
  }
}

/// Works out once more what runs cost: a list of what is held, stage by stage, is followed backward.
class Followed {
 public:
  Followed(const PipelineProfile& profile, const RecomputedRuns& runs) : profile_(profile), runs_(runs) {}

  RecomputeChoice choice(std::uint32_t first, std::uint32_t end) {
    forward(first, end, RecomputedRun{first, end}, /*is_chunk=*/true);
    RecomputeChoice choice{runs_};
    for (const Held& held : held_) choice.kept_bytes += held.bytes;
    while (!held_.empty()) {
      const Held last = held_.back();
      if (!last.run) {
        held_.pop_back();
        continue;
      }
      // What enters the run is counted by the micro-batch for as long as it runs.
      std::vector<Held> before(held_.begin(), held_.end() - 1);
      choice.seconds += backward_through(*last.run, choice.run_bytes);
      held_ = std::move(before);
    }
    return choice;
  }

 private:
  struct Held {
    std::uint64_t bytes;
    const RecomputedRun* run;  ///< which it enters
  };
  const RecomputedRun* outermost_at(std::uint32_t stage, const RecomputedRun& within, bool is_chunk) const {
    for (const RecomputedRun& run : runs_) {
      const bool is_within =
          run.first >= within.first && run.end <= within.end && (is_chunk || run != within);
      if (run.first == stage && is_within) return &run;
    }
    return nullptr;
  }
  void forward(std::uint32_t first, std::uint32_t end, const RecomputedRun& within, bool is_chunk) {
    for (std::uint32_t stage = first; stage < end;) {
      if (const RecomputedRun* const run = outermost_at(stage, within, is_chunk)) {
        held_.push_back({input_bytes(profile_, *run), run});
        stage = run->end;
      } else {
        held_.push_back({profile_.stages[stage++].kept_bytes, nullptr});
      }
    }
  }
  double backward_through(const RecomputedRun& run, std::uint64_t& most) {
    double seconds = 0;
    for (std::uint32_t stage = run.first; stage < run.end; ++stage)
      seconds += profile_.stages[stage].forward_seconds;
    const std::vector<Held> around = std::exchange(held_, {});
    inside_.push_back(0);
    forward(run.first, run.end, run, /*is_chunk=*/false);
    while (!held_.empty()) {
      inside_.back() = 0;
      for (const Held& held : held_) inside_.back() += held.bytes;
      most = std::max(most, std::accumulate(inside_.begin(), inside_.end(), std::uint64_t{0}));
      const Held last = held_.back();
      if (last.run) seconds += backward_through(*last.run, most);
      held_.pop_back();
    }
    inside_.pop_back();
    held_ = around;
    return seconds;
  }

  const PipelineProfile& profile_;
  const RecomputedRuns& runs_;
  std::vector<Held> held_;
  std::vector<std::uint64_t> inside_;  ///< of the runs that are being recomputed
};

TEST(PipelineRecompute, RunsWithinRunsCostWhatIsHeld) {
  std::mt19937_64 random(12);
  std::size_t nested = 0;
  for (int round = 0; round < 20; ++round) {
    const auto stages = static_cast<std::uint32_t>(1 + random() % 5);
    const PipelineProfile profile = random_chain(random, stages);
    const auto first = static_cast<std::uint32_t>(random() % stages);
    for (const RecomputedRuns& runs : all_nested(first, stages)) {
      check_runs(runs, stages);
      const RecomputeChoice choice = recompute_choice(profile, {first, stages}, runs);
      const RecomputeChoice expected = Followed(profile, runs).choice(first, stages);
      ASSERT_EQ(choice.kept_bytes, expected.kept_bytes);
      ASSERT_EQ(choice.run_bytes, expected.run_bytes);
      ASSERT_DOUBLE_EQ(choice.seconds, expected.seconds);
      nested += choice.runs.size() > 1 && choice.runs[1].end <= choice.runs[0].end ? 1 : 0;
    }
  }
  EXPECT_GT(nested, 100U);
}

TEST(PipelineRecompute, RunsOfASchedulePayWhatItPays) {
  std::mt19937_64 random(14);
  std::size_t nested = 0;
  for (int round = 0; round < 200; ++round) {
    const auto stages = static_cast<std::uint32_t>(1 + random() % 14);
    PipelineProfile profile = random_chain(random, stages);
    profile.skips.clear();
    ChainProfile chain;
    for (const PipelineChunkCost& cost : profile.stages) {
      StageProfile& stage = chain.stages.emplace_back();
      stage.output_bytes = stage.forward_bytes = cost.output_bytes;
      stage.tape_bytes = stage.retape_bytes = cost.kept_bytes;
      stage.tape_has_input = false;
      stage.taped_bytes = cost.output_bytes + cost.kept_bytes;
      stage.backward_bytes = 40;
      stage.forward_seconds = stage.retape_seconds = cost.forward_seconds;
    }
    const std::uint64_t least = minimum_bytes(chain), most = natural_peak_bytes(chain);
    const std::uint64_t budget_bytes = least + random() % ((most - least) / 3 + 1);
    Schedule schedule;
    try {
      schedule =
          plan_chain(chain, budget_bytes, {.solver = ChainSolver::kDynamic, .slots = 200, .threads = 1});
    } catch (const BudgetError&) {
      continue;
    }
    const std::optional<RecomputedRuns> runs = runs_of_schedule(schedule, 0);
    if (!runs && stages <= 6) continue;  // it may keep something for longer
    ASSERT_TRUE(runs) << schedule.text();
    check_runs(*runs, stages);
    const RecomputeChoice choice = recompute_choice(profile, {0, stages}, *runs);
    EXPECT_DOUBLE_EQ(choice.seconds, simulate(chain, schedule).recomputed_seconds) << schedule.text();
    // As what a run of all stages does when it is recomputed, where what has been used is gone.
    RecomputedRuns within = {{0, stages}};
    within.insert(within.end(), runs->begin() + (!runs->empty() && runs->front() == within.front() ? 1 : 0),
                  runs->end());
    EXPECT_LE(recompute_choice(profile, {0, stages}, within).run_bytes, budget_bytes) << schedule.text();
    for (std::size_t i = 1; i < runs->size(); ++i) nested += (*runs)[i].end <= (*runs)[i - 1].end ? 1 : 0;
  }
  EXPECT_GT(nested, 30U);
  EXPECT_FALSE(runs_of_schedule({}, 0));
  using Kind = ScheduleOp::Kind;
  EXPECT_FALSE(runs_of_schedule({2, {{Kind::kForward, 1}, {Kind::kTaped, 2}, {Kind::kBackward, 2}}}, 0));
  EXPECT_FALSE(runs_of_schedule({1, {{Kind::kTaped, 1}, {Kind::kOffloadTape, 1}, {Kind::kBackward, 1}}}, 0));
}

// Where no runs that are apart from each other fit, those within each other may.
TEST(PipelineRecompute, PlansFitWhereRunsWithinRunsDo) {
  std::mt19937_64 random(15);
  int only_nested = 0;
  double regret = 0;
  for (int round = 0; round < 40; ++round) {
    constexpr std::uint32_t kStages = 6;
    PipelineProfile profile = random_chain(random, kStages);
    for (PipelineChunkCost& stage : profile.stages) stage.kept_bytes += 100;
    const auto seconds_within = [&](std::uint64_t bytes, const std::vector<RecomputeChoice>& all) {
      double least = std::numeric_limits<double>::infinity();
      for (const RecomputeChoice& choice : all) {
        if (choice.kept_bytes + choice.run_bytes <= bytes) least = std::min(least, choice.seconds);
      }
      return least;
    };
    const std::vector<RecomputeChoice> planned = recompute_choices(profile, 0, kStages);
    std::vector<RecomputeChoice> apart;
    for (RecomputedRuns& runs : all_runs(0, kStages))
      apart.push_back(recompute_choice(profile, {0, kStages}, std::move(runs)));
    std::vector<RecomputeChoice> every;
    for (RecomputedRuns& runs : all_nested(0, kStages))
      every.push_back(recompute_choice(profile, {0, kStages}, std::move(runs)));
    for (const RecomputeChoice& choice : planned) {
      const RecomputeChoice same = recompute_choice(profile, {0, kStages}, choice.runs);
      ASSERT_EQ(choice.kept_bytes, same.kept_bytes);
      ASSERT_EQ(choice.run_bytes, same.run_bytes);
      ASSERT_DOUBLE_EQ(choice.seconds, same.seconds);
    }
    for (std::uint64_t bytes = 200; bytes < 2'000; bytes += 50) {
      // A chain has outputs that are being made as well, and is cut into slots.
      const double best = seconds_within(bytes, every),
                   found = seconds_within(bytes + bytes / 20 + 3 * kMostOutput, planned);
      if (!std::isfinite(best) || std::isfinite(seconds_within(bytes, apart))) continue;
      ++only_nested;
      ASSERT_TRUE(std::isfinite(found)) << bytes << ", round " << round;
      regret += std::max(0.0, found / best - 1);
    }
  }
  EXPECT_GT(only_nested, 20);
  EXPECT_LT(regret / only_nested, 0.1) << only_nested;
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
    double before = std::numeric_limits<double>::infinity();
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
      EXPECT_LE(plan.cost.makespan_seconds, before * (1 + 1e-9)) << "with more bytes, round " << round;
      before = plan.cost.makespan_seconds;
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
  for (const RecomputedRuns& runs : std::vector<RecomputedRuns>{{{0, 0}},
                                                                {{2, 1}},
                                                                {{3, 5}},
                                                                {{0, 2}, {1, 3}},
                                                                {{2, 3}, {0, 1}},
                                                                {{0, 2}, {0, 2}},
                                                                {{0, 1}, {0, 2}}})
    EXPECT_NE(config_error([&] { cut_costs(profile, {2}, runs); }).find("RecomputedRun: stages"),
              std::string::npos);
  EXPECT_EQ(whole_chunks(4, {1, 3}), (RecomputedRuns{{0, 1}, {1, 3}, {3, 4}}));
  EXPECT_EQ(runs_within({{0, 3}, {3, 4}}, {1, 4}), (RecomputedRuns{{1, 3}, {3, 4}}));
  EXPECT_EQ(runs_within({{0, 4}, {0, 2}, {1, 2}, {3, 4}}, {1, 3}), (RecomputedRuns{{1, 3}, {1, 2}}));
}

}  // namespace
}  // namespace reef
