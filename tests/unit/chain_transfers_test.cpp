// Schedules whose outputs and tapes leave for a tier meanwhile: what they cost, and how they are chosen.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <queue>

#include "reef/chain_solver.h"
#include "reef/error.h"
#include "support/chains.h"
#include "support/xml.h"

namespace reef {
namespace {

ChainProfile beside_a_tier(ChainProfile profile, double bytes_per_second,
                           std::uint64_t capacity_bytes = 1 << 20) {
  profile.tier_speed.bytes_per_second = bytes_per_second;
  profile.tier_capacity_bytes = capacity_bytes;
  return profile;
}

/// Tapes are copied in two seconds.
ChainProfile three_alike() {
  StageProfile stage{"s"};
  stage.output_bytes = 10;
  stage.tape_bytes = 100;
  stage.forward_bytes = 10;
  stage.taped_bytes = 110;
  stage.retape_bytes = 100;
  stage.backward_bytes = 20;
  stage.forward_seconds = stage.retape_seconds = 1;
  stage.backward_seconds = 2;
  return beside_a_tier({{stage, stage, stage}}, 50);
}

TEST(ChainTransfers, CostsAreAddedUpByHand) {
  const ScheduleCost cost =
      simulate(three_alike(), schedule_of(3, "T1 >t1 T2 ~t1 T3 L -a3 B3 -a2 <t1 B2 -a1 B1"));
  EXPECT_EQ(cost.begin_seconds[1], 1);  // the copy, beside T2
  EXPECT_EQ(cost.end_seconds[1], 3);
  EXPECT_EQ(cost.begin_seconds[2], 1);
  EXPECT_EQ(cost.begin_seconds[4], 3);  // T3 waits for it
  EXPECT_EQ(cost.begin_seconds[9], 6);  // and back beside B2
  EXPECT_EQ(cost.end_seconds[9], 8);
  EXPECT_EQ(cost.seconds, 10);
  EXPECT_EQ(cost.waited_seconds, 1);
  EXPECT_EQ(cost.recomputed_seconds, 0);
  EXPECT_EQ(cost.offloaded_bytes, 100U);
  EXPECT_EQ(cost.tier_bytes, 100U);
  EXPECT_EQ(cost.load[3].total(), 20U + 200);             // while ~t1 waits
  EXPECT_EQ(cost.load[4].total(), 20U + 100 + 110);       // T3
  EXPECT_EQ(cost.load[7].total(), 20U + 200 + 10 + 20);   // B3
  EXPECT_EQ(cost.load[10].total(), 10U + 200 + 10 + 20);  // B2: tape 1 is on its way
  EXPECT_EQ(cost.peak_bytes, 250U);
  EXPECT_EQ(cost.peak_operation, 7U);

  // Half of a copy's time is work that the stages wait for, T2 and B2 at once.
  ChainProfile on_their_cores = three_alike();
  on_their_cores.tier_speed.work_share = 0.5;
  const ScheduleCost slower =
      simulate(on_their_cores, schedule_of(3, "T1 >t1 T2 ~t1 T3 L -a3 B3 -a2 <t1 B2 -a1 B1"));
  EXPECT_EQ(slower.begin_seconds[2], 2);
  EXPECT_EQ(slower.begin_seconds[4], 3);  // T3, and tape 1 has left
  EXPECT_EQ(slower.begin_seconds[9], 6);
  EXPECT_EQ(slower.begin_seconds[10], 7);
  EXPECT_EQ(slower.seconds, 11);
  EXPECT_EQ(slower.waited_seconds, 2);
  EXPECT_EQ(slower.peak_bytes, cost.peak_bytes);

  // One lane: output 1 waits for tape 1, and B2 for both to come back.
  const ScheduleCost two =
      simulate(three_alike(), schedule_of(3, "T1 >t1 >a1 T2 ~t1 ~a1 T3 L -a3 B3 -a2 <a1 <t1 B2 -a1 B1"));
  EXPECT_EQ(two.end_seconds[2], 3.2);
  EXPECT_EQ(two.begin_seconds[6], 3.2);
  EXPECT_DOUBLE_EQ(two.begin_seconds[13], 6.4);  // for output 1, which its tape holds
  EXPECT_DOUBLE_EQ(two.begin_seconds[15], 8.4);
  EXPECT_EQ(two.load[6].output_bytes, 10U);
}

TEST(ChainTransfers, WhatIsNotLegalIsRefusedByName) {
  const struct {
    const char* words;
    const char* why;
  } rows[] = {
      {"T1 ~t1", "operation 2 (~t1) evicts what is not there, or has no copy in the tier"},
      {"T1 >t1 >t1", "operation 3 (>t1) copies what is not there, or has been copied"},
      {"F1 >t1", "operation 2 (>t1) copies what is not there, or has been copied"},
      {"T1 <t1", "operation 2 (<t1) brings back what is not away"},
      {"T1 >a1 ~a1", "operation 3 (~a1) evicts what the next stage reads"},
      {"T1 T2 T3 >a3", "operation 4 (>a3) moves the last output, which the program has"},
      {"T1 T2 T3 L -a3 >t3 ~t3 B3", "operation 8 (B3) needs something that is in the tier"},
      {"T1 T2 >a1 ~a1 T3 L -a3 B3 -a2 B2", "operation 10 (B2) needs something that is in the tier"},
      {"F1 F2 >a1 ~a1 F3 L -a3 F2", "operation 8 (F2) does not find its input"},
      {"T1 T2 >a1 ~a1 -a1 T3 L -a3 F1", "operation 9 (F1) makes an output that is in the tier"},
  };
  for (const auto& row : rows) {
    try {
      simulate(three_alike(), schedule_of(3, row.words));
      FAIL() << row.words;
    } catch (const ConfigError& error) {
      EXPECT_EQ(std::string(error.what()).find(std::string("Schedule: ") + row.why), 0U) << error.what();
    }
  }
  const Schedule moves = schedule_of(3, "T1 >t1 T2 ~t1 T3 L -a3 B3 -a2 <t1 B2 -a1 B1");
  EXPECT_THROW(simulate(beside_a_tier(three_alike(), 0), moves), ConfigError);
  EXPECT_THROW(simulate(beside_a_tier(three_alike(), 50, 99), moves), ConfigError);
  EXPECT_NO_THROW(simulate(beside_a_tier(three_alike(), 50, 100), moves));
  EXPECT_THROW(check(beside_a_tier(three_alike(), -1)), ConfigError);
  for (const double share : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    ChainProfile profile = three_alike();
    profile.tier_speed.work_share = share;
    EXPECT_THROW(check(profile), ConfigError);
  }
}

TEST(ChainTransfers, TogetherTheyAreNeverSlowerThanEither) {
  std::mt19937_64 random(11);
  int better = 0, budgets = 0;
  for (int row = 0; row < 1500; ++row) {
    ChainProfile profile =
        beside_a_tier(random_chain(random, 1 + row % 12), std::array{0.25, 0.5, 1.0, 2.0, 8.0}[row % 5]);
    profile.tier_speed.work_share = std::array{0.0, 0.0, 0.1, 1.0}[row % 4];
    const std::uint64_t most = natural_peak_bytes(profile);
    const std::uint64_t budget_bytes = random_chain_budget(random, minimum_bytes(profile), most);
    const double recomputed = seconds_of(profile, budget_bytes, ChainSolver::kDynamic);
    const double moved = seconds_of(profile, budget_bytes, ChainSolver::kOffload);
    const double both = seconds_of(profile, budget_bytes, ChainSolver::kCombined);
    ASSERT_LE(both, std::min(recomputed, moved)) << "row " << row << ": " << profile.json();
    better += both < std::min(recomputed, moved) ? 1 : 0;
    budgets += both < kNever ? 1 : 0;
  }
  std::printf("faster than either alone in %d of %d budgets\n", better, budgets);
  EXPECT_GT(better, budgets / 8);
}

TEST(ChainTransfers, WithoutATierOrWithAFastOneItIsWhatIsKnown) {
  std::mt19937_64 random(12);
  for (int row = 0; row < 300; ++row) {
    const ChainProfile alone = random_chain(random, 2 + row % 9);
    const std::uint64_t budget_bytes =
        random_chain_budget(random, minimum_bytes(alone), natural_peak_bytes(alone));
    const double dynamic = seconds_of(alone, budget_bytes, ChainSolver::kDynamic);
    ASSERT_EQ(seconds_of(alone, budget_bytes, ChainSolver::kCombined), dynamic);
    // A copy takes longer than all else.
    if (dynamic < kNever) {
      ASSERT_EQ(seconds_of(beside_a_tier(alone, 1e-6), budget_bytes, ChainSolver::kCombined), dynamic);
    }
    // It takes no time that counts: what can be moved is not computed twice.
    const ChainProfile fast = beside_a_tier(alone, 1e12);
    const double moved = seconds_of(fast, budget_bytes, ChainSolver::kOffload);
    if (moved == kNever) continue;
    double once = 0;
    for (const StageProfile& stage : alone.stages) once += stage.forward_seconds + stage.backward_seconds;
    ASSERT_NEAR(moved, once, 1e-6);
    ASSERT_NEAR(seconds_of(fast, budget_bytes, ChainSolver::kCombined), once, 1e-6);
  }
}

TEST(ChainTransfers, WhatDoesNotFitIsRefusedWithWhatDoes) {
  std::mt19937_64 random(13);
  for (int row = 0; row < 200; ++row) {
    const ChainProfile profile =
        beside_a_tier(random_chain(random, 2 + row % 9), 1, row % 3 == 0 ? 5 : 1 << 20);
    for (const ChainSolver solver : {ChainSolver::kOffload, ChainSolver::kCombined}) {
      try {
        plan_chain(profile, 0, {.solver = solver});
        FAIL() << name(solver);
      } catch (const BudgetError& error) {
        const std::uint64_t smallest = error.smallest_budget_bytes();
        EXPECT_LT(seconds_of(profile, smallest, solver), kNever) << name(solver);
        EXPECT_EQ(seconds_of(profile, smallest - 1, solver), kNever) << name(solver);
        EXPECT_LE(smallest, natural_peak_bytes(profile));
      }
    }
  }
}

/// The least time of all legal schedules, transfers and recomputation at will: Dijkstra over what is where
/// and when copies will be done. For chains of two or three stages whose times are multiples of a half.
class AllSchedules {
 public:
  /// Those that take `enough` seconds or more are not looked at.
  AllSchedules(const ChainProfile& profile, std::uint64_t budget_bytes, double enough)
      : profile_(profile),
        stages_(static_cast<int>(profile.stages.size())),
        budget_bytes_(budget_bytes),
        enough_(enough) {}

  double least_seconds() {
    push({}, 0);
    while (!open_.empty()) {
      const auto [cost, state] = open_.top();
      open_.pop();
      auto [known, first] = best_.try_emplace(state, cost);
      if (!first && known->second < cost) continue;
      if (state.lost && state.top == 0) return cost;
      expand(state, cost);
    }
    return enough_;
  }

 private:
  // Times are from now, in sixteenths of a second, so that equal states are equal.
  struct Item {
    bool lasts = false, copied = false, away = false;
    int left = 0, back = 0;
    auto operator<=>(const Item&) const = default;
  };
  struct State {
    std::array<bool, 5> named{}, taped{};
    std::array<Item, 5> outputs{}, tapes{};
    int lane = 0, top = 0;
    bool lost = false;
    auto operator<=>(const State&) const = default;
  };
  using Open = std::pair<double, State>;
  struct Later {
    bool operator()(const Open& a, const Open& b) const { return a.first > b.first; }
  };

  const StageProfile& of(int stage) const { return profile_.stages[static_cast<std::size_t>(stage - 1)]; }
  int own_tape(int i) const {
    return static_cast<int>(of(i).tape_bytes - (of(i).tape_has_output ? of(i).output_bytes : 0));
  }
  static std::size_t at(int stage) { return static_cast<std::size_t>(stage); }

  // What is to be done at least.
  double rest(const State& state) const {
    double seconds = 0;
    for (int i = 1; i <= stages_; ++i) {
      if (!state.lost || i <= state.top) seconds += of(i).backward_seconds;
      if (!state.lost && i > state.top) seconds += of(i).forward_seconds;
    }
    return seconds;
  }
  void push(const State& state, double cost) {
    if (cost + rest(state) >= enough_) return;
    auto [known, first] = best_.try_emplace(state, cost);
    if (!first && known->second <= cost) return;
    known->second = cost;
    open_.push({cost, state});
  }
  void settle(State& state) const {
    for (int i = 1; i <= stages_; ++i) {
      Item& output = state.outputs[at(i)];
      Item& tape = state.tapes[at(i)];
      const bool read = i < stages_ && state.taped[at(i + 1)] && of(i + 1).tape_has_input;
      output.lasts = state.named[at(i)] || read || (state.taped[at(i)] && of(i).tape_has_output);
      tape.lasts = state.taped[at(i)];
      if (!output.lasts) output = {};
      if (!tape.lasts) tape = {};
    }
  }
  static void pass(State& state, int time) {
    const auto less = [&](int& when) { when = std::max(0, when - time); };
    less(state.lane);
    for (auto* items : {&state.outputs, &state.tapes}) {
      for (Item& item : *items) {
        less(item.left);
        less(item.back);
      }
    }
  }
  std::uint64_t live(const State& state) const {
    std::uint64_t bytes = 0;
    for (int i = 1; i <= stages_; ++i) {
      if (state.outputs[at(i)].lasts && !state.outputs[at(i)].away) bytes += of(i).output_bytes;
      if (state.tapes[at(i)].lasts && !state.tapes[at(i)].away)
        bytes += static_cast<std::uint64_t>(own_tape(i));
      if (state.lost && i > state.top) bytes += of(i).gradient_bytes;
    }
    return bytes + (state.lost && state.top > 0 ? of(state.top).output_bytes : 0);
  }
  bool fits(const State& state, std::uint64_t bytes) const { return live(state) + bytes <= budget_bytes_; }
  int copy_time(int bytes) const {
    return static_cast<int>(16 * bytes / profile_.tier_speed.bytes_per_second);
  }

  void go(State state, double cost, int wait, double seconds) {
    const int time = wait + static_cast<int>(16 * seconds);
    pass(state, time);
    settle(state);
    if (fits(state, 0)) push(state, cost + time / 16.0);
  }

  void forward(const State& state, double cost, int i) {
    if (i > 1 && (!state.named[at(i - 1)] || state.outputs[at(i - 1)].away)) return;
    if (state.outputs[at(i)].away) return;
    const int wait = state.outputs[at(i - 1)].back;
    State to = state;
    if (!state.lost) to.top = i;
    if (!state.named[at(i)]) {
      to.named[at(i)] = true;
      if (fits(state, of(i).forward_bytes)) go(to, cost, wait, of(i).forward_seconds);
      to.taped[at(i)] = true;
      if (!state.taped[at(i)] && fits(state, of(i).taped_bytes)) go(to, cost, wait, of(i).forward_seconds);
    }
    to = state;
    to.taped[at(i)] = true;
    if (state.lost && !state.taped[at(i)] && fits(state, of(i).retape_bytes))
      go(to, cost, wait, of(i).retape_seconds);
  }

  void move(const State& state, double cost, bool is_output, int i) {
    const auto of_state = [&](State& s) -> Item& { return is_output ? s.outputs[at(i)] : s.tapes[at(i)]; };
    State to = state;
    Item& item = of_state(to);
    if (!item.lasts) return;
    const int bytes = is_output ? static_cast<int>(of(i).output_bytes) : own_tape(i);
    if (item.away) {
      to.lane += copy_time(bytes);
      item.away = false;
      item.back = to.lane;
      go(to, cost, 0, 0);
    } else if (!item.copied) {
      to.lane += copy_time(bytes);
      item.copied = true;
      item.left = to.lane;
      go(to, cost, 0, 0);
    } else if (!is_output || state.lost || state.top > i) {
      item.away = true;
      go(to, cost, std::max(item.left, item.back), 0);
    }
  }

  void expand(const State& state, double cost) {
    for (int i = 1; i <= stages_; ++i) {
      if (state.lost ? i <= state.top : i == state.top + 1) forward(state, cost, i);
      if (i < stages_) move(state, cost, true, i);
      move(state, cost, false, i);
      State to = state;
      if (state.named[at(i)]) {
        to.named[at(i)] = false;
        go(to, cost, 0, 0);
      }
      to = state;
      if (state.taped[at(i)]) {
        to.taped[at(i)] = false;
        go(to, cost, 0, 0);
      }
    }
    const int top = state.top;
    if (!state.lost && top == stages_ && state.named[at(top)] && fits(state, of(top).output_bytes)) {
      State to = state;
      to.lost = true;
      go(to, cost, 0, 0);
    }
    if (!state.lost || !state.taped[at(top)] || state.named[at(top)]) return;
    const Item& tape = state.tapes[at(top)];
    const Item input = of(top).tape_has_input ? state.outputs[at(top - 1)] : Item{};
    const Item& output = state.outputs[at(top)];
    if (tape.away || input.away || output.away || !fits(state, of(top).backward_bytes)) return;
    State to = state;
    to.taped[at(top)] = false;
    --to.top;
    go(to, cost, std::max({tape.back, input.back, output.back}), of(top).backward_seconds);
  }

  const ChainProfile& profile_;
  int stages_;
  std::uint64_t budget_bytes_;
  double enough_;
  std::priority_queue<Open, std::vector<Open>, Later> open_;
  std::map<State, double> best_;
};

TEST(ChainTransfers, ASearchOfAllSchedulesFindsLittleThatIsFaster) {
  std::mt19937_64 random(14);
  int budgets = 0, misses = 0;
  double worst = 0, sum = 0;
  for (int row = 0; row < 40; ++row) {
    const ChainProfile profile =
        beside_a_tier(random_chain(random, row % 10 == 9 ? 3 : 2), std::array{0.5, 1.0, 2.0}[row % 3]);
    const std::uint64_t budget_bytes =
        random_chain_budget(random, minimum_bytes(profile), natural_peak_bytes(profile));
    const double found = seconds_of(profile, budget_bytes, ChainSolver::kCombined);
    if (found == kNever) continue;
    const double best = AllSchedules(profile, budget_bytes, found).least_seconds();
    ++budgets;
    misses += found > best ? 1 : 0;
    worst = std::max(worst, found / best - 1);
    sum += found / best - 1;
  }
  std::printf(
      "combined misses the best of all schedules in %d of %d budgets, by %.1f %% on average and %.1f %% at "
      "worst\n",
      misses, budgets, sum / budgets * 100, worst * 100);
  EXPECT_LE(sum / budgets, 0.05);
}

TEST(ChainTransfers, TheChartShowsThem) {
  const std::string drawn = schedule_chart(
      three_alike(), schedule_of(3, "T1 >t1 T2 ~t1 T3 L -a3 B3 -a2 <t1 B2 -a1 B1"), 260, "moved");
  EXPECT_NO_THROW(test::XmlParser(drawn).parse());
  EXPECT_NE(drawn.find("to the tier"), std::string::npos);
  EXPECT_NE(drawn.find("waited for transfers"), std::string::npos);
}

}  // namespace
}  // namespace reef
