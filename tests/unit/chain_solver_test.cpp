#include "reef/chain_solver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <map>
#include <queue>
#include <set>
#include <tuple>

#include "chain/solvers.h"
#include "reef/error.h"
#include "support/chains.h"

namespace reef {
namespace {

/// All persistent schedules, by sets of what is there: an output that was kept when the next one was made of
/// it stays until the backward pass of the stage that reads it, or until that has a tape that does without;
/// so does a tape, and the output with it, until its own. After the loss a tape is made while there is none
/// of a later stage.
class PersistentSearch {
 public:
  PersistentSearch(const ChainProfile& profile, std::uint64_t budget_bytes)
      : profile_(profile), stages_(static_cast<int>(profile.stages.size())), budget_bytes_(budget_bytes) {}

  double least_seconds() {
    push({}, 0);
    while (!open_.empty()) {
      const auto [cost, state] = open_.top();
      open_.pop();
      if (!closed_.insert(state).second) continue;
      if (state.lost && state.top == 0) return cost;
      expand(state, cost);
    }
    return kNever;
  }

 private:
  struct State {
    std::set<int> kept, tapes;
    int running = 0;  ///< an output that nothing has been made of yet; 0: none
    int top = 0;      ///< before the loss: the stage that has run last; after it: the next of backward
    bool lost = false;
    auto tie() const { return std::tie(kept, tapes, running, top, lost); }
    bool operator<(const State& other) const { return tie() < other.tie(); }
  };
  using Open = std::pair<double, State>;
  struct Later {
    bool operator()(const Open& a, const Open& b) const { return a.first > b.first; }
  };

  const StageProfile& of(int stage) const { return profile_.stages[static_cast<std::size_t>(stage - 1)]; }
  void push(const State& state, double cost) { open_.push({cost, state}); }

  std::uint64_t live_bytes(const State& state) const {
    std::set<int> outputs = state.kept;
    if (state.running > 0) outputs.insert(state.running);
    std::uint64_t bytes = 0;
    for (const int tape : state.tapes) {
      if (of(tape).tape_has_input) outputs.insert(tape - 1);
      bytes += of(tape).tape_bytes;
      if (of(tape).tape_has_output) {
        outputs.insert(tape);
        bytes -= of(tape).output_bytes;
      }
    }
    for (const int output : outputs) bytes += output > 0 ? of(output).output_bytes : 0;
    if (state.lost) {
      if (state.top > 0) bytes += of(state.top).output_bytes;
      for (int i = state.top + 1; i <= stages_; ++i) bytes += of(i).gradient_bytes;
    }
    return bytes;
  }
  bool fits(const State& state, std::uint64_t bytes) const {
    return live_bytes(state) + bytes <= budget_bytes_;
  }

  void run(const State& state, double cost, int stage) {
    const int input = stage - 1;
    if (input > 0 && state.running != input && !state.kept.contains(input)) return;
    if (state.running == stage || state.kept.contains(stage)) return;
    State kept = state;  // with the input, and whatever was running before
    if (kept.running > 0) kept.kept.insert(kept.running);
    kept.running = stage;
    if (!state.lost) kept.top = stage;
    if (fits(state, of(stage).forward_bytes)) {
      push(kept, cost + of(stage).forward_seconds);
      if (state.running == input && input > 0) {
        State passed = kept;
        passed.kept.erase(input);
        push(passed, cost + of(stage).forward_seconds);
      }
    }
    const bool later_is_taped = state.tapes.upper_bound(stage) != state.tapes.end();
    if (!state.tapes.contains(stage) && !later_is_taped && fits(state, of(stage).taped_bytes)) {
      kept.tapes.insert(stage);
      kept.kept.insert(stage);
      kept.running = 0;
      push(kept, cost + of(stage).forward_seconds);
      if (!of(stage).tape_has_input) {
        kept.kept.erase(input);
        push(kept, cost + of(stage).forward_seconds);
      }
    }
  }

  void expand(const State& state, double cost) {
    if (!state.lost) {
      if (state.top < stages_) return run(state, cost, state.top + 1);
      if (!fits(state, of(stages_).output_bytes)) return;
      State after = state;
      after.running = 0;
      after.kept.erase(stages_);
      after.lost = true;
      push(after, cost);
      return;
    }
    for (int stage = 1; stage < state.top; ++stage) run(state, cost, stage);
    const int top = state.top;
    State there = state;
    double seconds = cost;
    if (!state.tapes.contains(top)) {
      const bool has_input = top == 1 || state.running == top - 1 || state.kept.contains(top - 1);
      if (!has_input || !fits(state, of(top).retape_bytes)) return;
      seconds += of(top).retape_seconds;
      there.tapes.insert(top);
    }
    if (there.running > 0) there.kept.insert(there.running);
    there.running = 0;
    if (!of(top).tape_has_input) there.kept.erase(top - 1);
    if (!fits(there, of(top).backward_bytes)) return;
    there.tapes.erase(top);
    there.kept.erase(top - 1);
    --there.top;
    push(there, seconds + of(top).backward_seconds);
  }

  const ChainProfile& profile_;
  int stages_;
  std::uint64_t budget_bytes_;
  std::priority_queue<Open, std::vector<Open>, Later> open_;
  std::set<State> closed_;
};

TEST(ChainSolver, DynamicIsTheBestOfAllPersistentSchedules) {
  std::mt19937_64 random(1);
  int feasible = 0, freer = 0;
  for (int row = 0; row < 10'000; ++row) {
    const ChainProfile profile = random_chain(random, 1 + row % 4);
    const std::uint64_t least = minimum_bytes(profile);
    const std::uint64_t budget_bytes = random_chain_budget(random, least, natural_peak_bytes(profile));
    const double found = seconds_of(profile, budget_bytes, ChainSolver::kDynamic);
    ASSERT_EQ(found < kNever, budget_bytes >= least) << "row " << row;
    const double searched = PersistentSearch(profile, budget_bytes).least_seconds();
    if (searched == kNever && found < kNever) {  // the least needs more freedom
      ++freer;
      ASSERT_EQ(found, seconds_of(profile, budget_bytes, ChainSolver::kExact)) << "row " << row;
      continue;
    }
    ASSERT_EQ(found, searched) << "row " << row << ": " << profile.json();
    feasible += found < kNever ? 1 : 0;
  }
  EXPECT_GT(feasible, 7'000);
  EXPECT_LT(freer, 50);
}

TEST(ChainSolver, DynamicIsTheBestOfAllPersistentSchedulesOfLongerChains) {
  std::mt19937_64 random(2);
  for (int row = 0; row < 60; ++row) {
    const ChainProfile profile = random_chain(random, 5 + row % 2);
    const std::uint64_t budget_bytes =
        random_chain_budget(random, least_peak(profile).bytes, natural_peak_bytes(profile));
    if (budget_bytes < least_peak(profile).bytes) continue;
    ASSERT_EQ(seconds_of(profile, budget_bytes, ChainSolver::kDynamic),
              PersistentSearch(profile, budget_bytes).least_seconds())
        << "row " << row << ": " << profile.json();
  }
}

TEST(ChainSolver, NoSolverBeatsExactWhichDynamicNearlyAlwaysEquals) {
  std::mt19937_64 random(3);
  int budgets = 0, misses = 0;
  double worst = 0;
  for (int row = 0; row < 10'000; ++row) {
    const ChainProfile profile = random_chain(random, 1 + row % 5);
    const std::uint64_t budget_bytes =
        random_chain_budget(random, minimum_bytes(profile), natural_peak_bytes(profile));
    const double best = seconds_of(profile, budget_bytes, ChainSolver::kExact);
    for (const ChainSolver solver : kChainSolvers) {
      ASSERT_GE(seconds_of(profile, budget_bytes, solver), best - 1e-9) << name(solver) << ", row " << row;
    }
    const double dynamic = seconds_of(profile, budget_bytes, ChainSolver::kDynamic);
    if (best == kNever) continue;
    ++budgets;
    if (dynamic <= best) continue;
    ++misses;
    ASSERT_LT(dynamic, kNever);
    worst = std::max(worst, dynamic / best - 1);
  }
  std::printf("dynamic misses the best of all schedules in %d of %d budgets, by %.1f %% at worst\n", misses,
              budgets, worst * 100);
  EXPECT_LE(misses, budgets / 100);
}

TEST(ChainSolver, ExactNeedsWhatItSays) {
  std::mt19937_64 random(4);
  for (int row = 0; row < 300; ++row) {
    const ChainProfile profile = random_chain(random, 1 + row % 5);
    const std::uint64_t least = exact_minimum_bytes(profile);
    EXPECT_EQ(least, minimum_bytes(profile));
    EXPECT_LE(least, least_peak(profile).bytes);
    EXPECT_LT(seconds_of(profile, least, ChainSolver::kExact), kNever);
    EXPECT_EQ(seconds_of(profile, least - 1, ChainSolver::kExact), kNever);
  }
}

// The example of a schedule that drops a tape before it is used, and is faster by it.
TEST(ChainSolver, ExactFindsWhatPersistenceForbids) {
  ChainProfile profile;
  const double forward[] = {3, 1, 1, 2};
  const std::uint64_t output[] = {1, 3, 2, 2};
  for (int i = 0; i < 4; ++i) {
    StageProfile stage{"s"};
    stage.output_bytes = stage.forward_bytes = output[i];
    stage.tape_bytes = stage.taped_bytes = stage.retape_bytes = 2 * output[i];
    stage.tape_has_output = true;
    stage.backward_bytes = i > 0 ? output[i - 1] : 0;
    stage.forward_seconds = stage.retape_seconds = forward[i];
    stage.backward_seconds = 2 * forward[i];
    profile.stages.push_back(stage);
  }
  bool faster = false;
  for (std::uint64_t budget_bytes = minimum_bytes(profile); budget_bytes <= natural_peak_bytes(profile);
       ++budget_bytes) {
    faster = faster || seconds_of(profile, budget_bytes, ChainSolver::kExact) <
                           seconds_of(profile, budget_bytes, ChainSolver::kDynamic);
  }
  EXPECT_TRUE(faster);
}

TEST(ChainSolver, MoreBytesAreNeverSlowerAndEnoughRecomputeNothing) {
  std::mt19937_64 random(5);
  for (int row = 0; row < 200; ++row) {
    const ChainProfile profile = random_chain(random, 8);
    double before = kNever;
    for (std::uint64_t budget_bytes = minimum_bytes(profile); budget_bytes <= natural_peak_bytes(profile);
         ++budget_bytes) {
      const double seconds = seconds_of(profile, budget_bytes, ChainSolver::kDynamic);
      ASSERT_LE(seconds, before);
      before = seconds;
    }
    const Schedule all = plan_chain(profile, natural_peak_bytes(profile));
    EXPECT_EQ(simulate(profile, all).recomputed_seconds, 0) << all.text();
  }
}

// Sizes of real chains, which rounding to slots moves: never too little is planned for, and where anything
// fits something is found.
TEST(ChainSolver, RoundingNeverBreaksABudgetNorRefusesOne) {
  std::mt19937_64 random(6);
  for (int row = 0; row < 300; ++row) {
    ChainProfile profile = random_chain(random, 2 + row % 20);
    for (StageProfile& stage : profile.stages) {
      for (auto* bytes : {&stage.output_bytes, &stage.tape_bytes, &stage.forward_bytes, &stage.taped_bytes,
                          &stage.retape_bytes, &stage.backward_bytes, &stage.gradient_bytes}) {
        *bytes *= 1'000'003 + static_cast<std::uint64_t>(row);
      }
    }
    const std::uint64_t least = minimum_bytes(profile);
    const std::uint64_t most = natural_peak_bytes(profile);
    double before = kNever;
    for (int i = 0; i <= 8; ++i) {
      const std::uint64_t budget_bytes = least + (most - least) * static_cast<std::uint64_t>(i) / 8;
      const double seconds = seconds_of(profile, budget_bytes, ChainSolver::kDynamic);
      ASSERT_LT(seconds, kNever) << "row " << row << ", budget " << i;
      ASSERT_LE(seconds, before * 1.05);
      before = seconds;
    }
    EXPECT_EQ(seconds_of(profile, least - 1, ChainSolver::kDynamic), kNever);
  }
}

TEST(ChainSolver, ThreadsChangeNothing) {
  std::mt19937_64 random(7);
  const ChainProfile profile = random_chain(random, 60);
  for (int i = 0; i <= 4; ++i) {
    const std::uint64_t least = minimum_bytes(profile);
    const std::uint64_t budget_bytes =
        least + (natural_peak_bytes(profile) - least) * static_cast<std::uint64_t>(i) / 4;
    const Schedule one = plan_chain(profile, budget_bytes, {.threads = 1});
    for (const std::uint32_t threads : {2U, 3U, 7U}) {
      EXPECT_EQ(plan_chain(profile, budget_bytes, {.threads = threads}).operations, one.operations);
    }
  }
}

std::size_t forwards(const Schedule& schedule) {
  return static_cast<std::size_t>(
      std::count_if(schedule.operations.begin(), schedule.operations.end(),
                    [](const auto& op) { return op.kind == ScheduleOp::Kind::kForward; }));
}

TEST(ChainSolver, RevolveTakesTheStepsOfItsClosedForm) {
  EXPECT_EQ(revolve_steps(10, 3), 15U);  // Griewank and Walther, table 1 and text
  EXPECT_EQ(revolve_steps(64, 8), 137U);
  for (std::uint32_t stages = 1; stages <= 40; ++stages) {
    const std::vector<Schedule> schedules = revolve_schedules(stages);
    ASSERT_EQ(schedules.size(), stages);
    for (std::uint32_t checkpoints = 1; checkpoints <= stages; ++checkpoints) {
      EXPECT_EQ(forwards(schedules[checkpoints - 1]), revolve_steps(stages, checkpoints))
          << stages << " stages, " << checkpoints << " checkpoints";
    }
  }
}

// Stages that are all alike, whose tapes are too large to be kept but one at a time: what remains is which
// outputs to keep, as for revolve. A piece that ends with the loss has no gradient yet, so one output more.
TEST(ChainSolver, DynamicReproducesRevolveWhereAllStagesAreAlike) {
  constexpr std::uint32_t kStages = 24;
  StageProfile alike{"alike"};
  alike.output_bytes = alike.forward_bytes = 1;
  alike.taped_bytes = 1000;
  alike.backward_bytes = 1;
  alike.forward_seconds = 1;
  const ChainProfile profile{std::vector<StageProfile>(kStages, alike)};
  constexpr std::uint64_t kNone = 1'000'000;
  const auto steps = [](std::uint64_t stages, std::uint64_t checkpoints) {
    return checkpoints > 0 ? revolve_steps(stages, checkpoints) : stages > 1 ? kNone : 0;
  };
  for (std::uint64_t checkpoints = 1; checkpoints <= 12; ++checkpoints) {
    // least[k][l]: of the loss and the l - 1 stages before it, with room for k outputs.
    std::vector<std::vector<std::uint64_t>> least(checkpoints + 2,
                                                  std::vector<std::uint64_t>(kStages + 2, kNone));
    for (std::uint64_t k = 0; k <= checkpoints + 1; ++k) {
      least[k][1] = 0;
      for (std::uint64_t l = 2; l <= kStages + 1 && k > 0; ++l) {
        for (std::uint64_t j = 1; j < l; ++j) {
          least[k][l] = std::min(least[k][l], j + least[k - 1][l - j] + steps(j, k - 1));
        }
      }
    }
    EXPECT_EQ(seconds_of(profile, checkpoints + 2, ChainSolver::kDynamic),
              least[checkpoints + 1][kStages + 1])
        << checkpoints;
  }
}

TEST(ChainSolver, PeriodicIsWhatItSays) {
  EXPECT_EQ(periodic_schedule(4, 4).text(), "T1 T2 -a1 T3 -a2 T4 -a3 L -a4 B4 B3 B2 B1");
  EXPECT_EQ(periodic_schedule(5, 2).text(),
            "F1 F2 -a1 F3 F4 -a3 T5 -a4 L -a5 B5 T3 -a2 R4 -a3 B4 B3 T1 R2 -a1 B2 B1");
}

TEST(ChainSolver, WhatCannotBeSolvedIsRefused) {
  std::mt19937_64 random(8);
  const ChainProfile profile = random_chain(random, 12);
  EXPECT_THROW(plan_chain({}, 100), ConfigError);
  EXPECT_THROW(plan_chain(profile, 100'000, {.solver = ChainSolver::kExact}), ConfigError);
  EXPECT_THROW(plan_chain(profile, 100'000, {.slots = 0}), ConfigError);
  for (const ChainSolver solver :
       {ChainSolver::kStoreAll, ChainSolver::kPeriodic, ChainSolver::kRevolve, ChainSolver::kDynamic}) {
    try {
      plan_chain(profile, 1, {.solver = solver});
      FAIL() << name(solver);
    } catch (const BudgetError& error) {
      EXPECT_LT(seconds_of(profile, error.smallest_budget_bytes(), solver), kNever) << name(solver);
      EXPECT_NE(std::string(error.what()).find(std::to_string(error.smallest_budget_bytes())),
                std::string::npos);
    }
  }
}

}  // namespace
}  // namespace reef
