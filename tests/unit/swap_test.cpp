#include "reef/swap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>

#include "reef/error.h"
#include "reef/trace.h"
#include "swap/simulation.h"

namespace reef {
namespace {

struct Shape {
  std::size_t pages = 6;
  std::size_t operators = 9;
  bool uniform = false;
  bool scratch = true;
};

// A sound trace: pages that do not persist are made at their first use and freed after their last.
Trace random_trace(std::mt19937_64& random, const Shape& shape) {
  const auto below = [&](std::uint64_t n) { return random() % n; };
  Trace trace;
  for (std::size_t i = 0; i < shape.pages; ++i)
    trace.pages.push_back({shape.uniform ? 4 : 1 + below(9), below(2) == 0});
  for (std::size_t i = 0; i < shape.operators; ++i) {
    TraceOperator op{"op" + std::to_string(i), 0.5 + static_cast<double>(below(4)), 0, {}, {}};
    if (shape.scratch && below(3) == 0) op.scratch_bytes = 1 + below(5);
    for (std::uint32_t page = 0; page < shape.pages; ++page) {
      if (below(4) == 0) op.accesses.push_back({page, below(3) == 0});
    }
    std::shuffle(op.accesses.begin(), op.accesses.end(), random);
    trace.operators.push_back(std::move(op));
  }
  for (std::uint32_t page = 0; page < shape.pages; ++page) {
    TraceAccess* first = nullptr;
    TraceOperator* last = nullptr;
    for (TraceOperator& op : trace.operators) {
      for (TraceAccess& access : op.accesses) {
        if (access.page != page) continue;
        if (first == nullptr) first = &access;
        last = &op;
      }
    }
    if (first == nullptr) trace.pages[page].persistent = true;
    if (trace.pages[page].persistent) continue;
    first->writes = true;
    last->frees.push_back(page);
  }
  return trace;
}

// The fewest bytes brought back in `steps` steps, whatever is evicted when: all schedules, by sets of
// resident pages.
std::uint64_t fewest_bytes_in(const Trace& trace, std::uint64_t budget_bytes, int steps) {
  using Set = std::uint32_t;
  std::vector<std::uint64_t> bytes_of(std::size_t{1} << trace.pages.size(), 0);
  for (Set set = 1; set < bytes_of.size(); ++set) {
    for (std::size_t page = 0; page < trace.pages.size(); ++page) {
      if (set >> page & 1) bytes_of[set] += trace.pages[page].bytes;
    }
  }
  Set alive = 0;
  for (std::size_t page = 0; page < trace.pages.size(); ++page)
    alive |= Set{trace.pages[page].persistent} << page;
  std::map<Set, std::uint64_t> costs{{0, 0}};
  for (int step = 0; step < steps; ++step) {
    for (const TraceOperator& op : trace.operators) {
      Set used = 0;
      for (const TraceAccess& access : op.accesses) used |= Set{1} << access.page;
      Set freed = 0;
      for (const std::uint32_t page : op.frees) freed |= Set{1} << page;
      std::map<Set, std::uint64_t> next;
      for (const auto& [resident, cost] : costs) {
        const std::uint64_t paid = cost + bytes_of[used & alive & ~resident];
        const Set others = resident & ~used;
        for (Set kept = others;; kept = (kept - 1) & others) {
          if (bytes_of[kept | used] + op.scratch_bytes <= budget_bytes) {
            const auto [known, is_new] = next.try_emplace((kept | used) & ~freed, paid);
            known->second = std::min(known->second, paid);
          }
          if (kept == 0) break;
        }
      }
      alive = (alive | used) & ~freed;
      costs = std::move(next);
    }
  }
  std::uint64_t fewest = ~std::uint64_t{0};
  for (const auto& [resident, cost] : costs) fewest = std::min(fewest, cost);
  return fewest;
}

std::uint64_t bytes_in_of(const Trace& trace, const SwapPlan& plan, std::uint64_t budget_bytes, int steps) {
  Simulation simulation(trace, budget_bytes, {});
  std::uint64_t bytes = 0;
  for (int step = 0; step < steps; ++step) bytes += simulation.step(plan).bytes_in;
  return bytes;
}

double compute_seconds(const Trace& trace) {
  double seconds = 0;
  for (const TraceOperator& op : trace.operators) seconds += op.seconds;
  return seconds;
}

std::uint64_t random_budget(std::mt19937_64& random, const Trace& trace) {
  const std::uint64_t least = minimum_bytes(trace);
  const std::uint64_t most = std::max(least, natural_peak_bytes(trace));
  return least + random() % (most - least + 1);
}

TEST(Swap, FarthestOnDemandIsOptimalForPagesOfOneSize) {
  std::mt19937_64 random(1);
  for (int row = 0; row < 10'000; ++row) {
    const Trace trace = random_trace(random, {.uniform = true, .scratch = false});
    const std::uint64_t budget_bytes = random_budget(random, trace);
    for (const int steps : {1, 2}) {
      EXPECT_EQ(bytes_in_of(trace, {Demand::kFarthest, {}}, budget_bytes, steps),
                fewest_bytes_in(trace, budget_bytes, steps))
          << "row " << row << ", steps " << steps;
    }
  }
}

TEST(Swap, NoPolicyBeatsTheOptimum) {
  std::mt19937_64 random(2);
  int optimal = 0;
  for (int row = 0; row < 10'000; ++row) {
    const Trace trace = random_trace(random, {});
    const std::uint64_t budget_bytes = random_budget(random, trace);
    const std::uint64_t fewest = fewest_bytes_in(trace, budget_bytes, 2);
    for (const SwapPolicy policy : kSwapPolicies) {
      const SwapPlan plan = plan_swaps(trace, budget_bytes, policy);
      EXPECT_GE(bytes_in_of(trace, plan, budget_bytes, 2), fewest) << name(policy) << ", row " << row;
    }
    optimal += bytes_in_of(trace, {Demand::kFarthest, {}}, budget_bytes, 2) == fewest;
  }
  EXPECT_GT(optimal, 5'000) << "pages of any size: farthest next use is no longer always best, but often";
}

TEST(Swap, EveryPolicyStaysWithinTheBudgetAndPaysForWhatItMoves) {
  std::mt19937_64 random(3);
  for (int row = 0; row < 10'000; ++row) {
    const Trace trace = random_trace(random, {.pages = 4 + random() % 20, .operators = 4 + random() % 40});
    const std::uint64_t budget_bytes = random_budget(random, trace);
    const SwapSpeeds speeds{1.0 + static_cast<double>(random() % 8), 1.0 + static_cast<double>(random() % 8)};
    for (const SwapPolicy policy : kSwapPolicies) {
      const SwapPlan plan = plan_swaps(trace, budget_bytes, policy, speeds);
      const SwapCost cost = simulate(trace, plan, budget_bytes, speeds);
      EXPECT_LE(cost.peak_bytes, budget_bytes) << name(policy) << ", row " << row;
      EXPECT_NEAR(cost.seconds, compute_seconds(trace) + cost.stalled_seconds, 1e-9);
      EXPECT_GE(cost.stalled_seconds, 0);
      // A lane never carries more than its speed, so a step that repeats takes at least as long as its
      // transfers less what was under way when it began.
      EXPECT_LE(static_cast<double>(cost.bytes_in) / speeds.in_bytes_per_second,
                cost.seconds + static_cast<double>(budget_bytes) / speeds.in_bytes_per_second + 1e-9);
    }
  }
}

TEST(Swap, NothingMovesWhenEverythingFits) {
  std::mt19937_64 random(4);
  for (int row = 0; row < 10'000; ++row) {
    const Trace trace = random_trace(random, {.pages = 10, .operators = 20});
    const std::uint64_t budget_bytes = std::max(natural_peak_bytes(trace), minimum_bytes(trace));
    for (const SwapPolicy policy :
         {SwapPolicy::kRecency, SwapPolicy::kFarthest, SwapPolicy::kAutoSwap, SwapPolicy::kCapuchin}) {
      const SwapCost cost = simulate(trace, plan_swaps(trace, budget_bytes, policy), budget_bytes);
      EXPECT_EQ(cost.evictions + cost.faults + cost.fetches, 0) << name(policy) << ", row " << row;
      EXPECT_EQ(cost.stalled_seconds, 0);
    }
  }
}

// Forward makes one page a layer, backward reads them last to first: the shape of training.
Trace chain(std::size_t layers, std::uint64_t bytes, double seconds) {
  Trace trace;
  for (std::size_t i = 0; i < layers; ++i) trace.pages.push_back({bytes, false});
  for (std::uint32_t i = 0; i < layers; ++i) {
    TraceOperator op{"forward", seconds, 0, {{i, true}}, {}};
    if (i > 0) op.accesses.push_back({i - 1, false});
    trace.operators.push_back(op);
  }
  for (auto i = static_cast<std::uint32_t>(layers); i-- > 0;) {
    trace.operators.push_back({"backward", seconds, 0, {{i, false}}, {i}});
  }
  return trace;
}

TEST(Swap, PrefetchHidesTransfersThatAreFasterThanCompute) {
  const Trace trace = chain(32, 100, 1.0);
  const SwapSpeeds speeds{200, 200};  // half an operator a page
  const std::uint64_t budget_bytes = 800;
  const SwapCost on_demand = simulate(trace, {Demand::kFarthest, {}}, budget_bytes, speeds);
  const SwapCost planned =
      simulate(trace, plan_swaps(trace, budget_bytes, SwapPolicy::kFarthest, speeds), budget_bytes, speeds);
  EXPECT_GT(on_demand.stalled_seconds, 10);
  EXPECT_EQ(planned.stalled_seconds, 0);
  EXPECT_EQ(planned.faults, 0);
  EXPECT_EQ(planned.bytes_in, on_demand.bytes_in);
}

TEST(Swap, WhenTransfersAreTheBottleneckTheStepTakesAsLongAsThey) {
  const Trace trace = chain(64, 100, 1.0);
  const SwapSpeeds speeds{50, 50};
  const SwapCost cost = simulate(trace, plan_swaps(trace, 1000, SwapPolicy::kFarthest, speeds), 1000, speeds);
  const double transfer = static_cast<double>(cost.bytes_in + cost.bytes_out) / 50;
  EXPECT_LE(cost.seconds, 1.15 * std::max(transfer, compute_seconds(trace)));
}

TEST(Swap, ABudgetBelowTheWorkingSetNamesTheOperatorAndTheLeastThatWouldDo) {
  Trace trace = chain(4, 100, 1.0);
  trace.operators[2].scratch_bytes = 50;
  try {
    plan_swaps(trace, 249, SwapPolicy::kFarthest);
    FAIL() << "no error";
  } catch (const ConfigError& error) {
    const std::string text = message_of(error);
    EXPECT_NE(text.find("operator 2 (forward)"), std::string::npos) << text;
    EXPECT_NE(text.find("at least 250"), std::string::npos) << text;
  }
  EXPECT_NO_THROW(plan_swaps(trace, 250, SwapPolicy::kFarthest));
}

TEST(Swap, UnsoundTracesAreRefused) {
  const auto refused = [](auto&& spoil) {
    Trace trace = chain(3, 100, 1.0);
    check(trace);
    spoil(trace);
    EXPECT_THROW(check(trace), ConfigError);
  };
  refused([](Trace& trace) { trace.operators[0].accesses[0].writes = false; });
  refused([](Trace& trace) { trace.operators[1].accesses.push_back({0, false}); });
  refused([](Trace& trace) { trace.operators[1].accesses.push_back({9, true}); });
  refused([](Trace& trace) { trace.operators[5].frees.clear(); });
  refused([](Trace& trace) { trace.operators[5].frees.push_back(1); });
  refused([](Trace& trace) { trace.operators[3].accesses.push_back({2, false}); });
  refused([](Trace& trace) { trace.pages[0].persistent = true; });
  refused([](Trace& trace) { trace.operators[0].frees.push_back(7); });
}

}  // namespace
}  // namespace reef
