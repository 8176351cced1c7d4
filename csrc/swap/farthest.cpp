// Belady's rule with its decisions moved earlier: a page that will be evicted leaves right after its last
// use, so that the copy out runs beside the operators, and comes back as late as its lane allows and as early
// as memory allows.
#include <algorithm>
#include <limits>

#include "swap/gap.h"
#include "swap/simulation.h"

namespace reef {
namespace {

struct Absence {
  std::uint32_t page;
  std::size_t left;      ///< operator after which it leaves
  std::size_t returned;  ///< operator that needs it, > left; may be counted on into the next step
};

// What farthest-next-use does in a step that repeats, as absences. A page that left in the step before is
// carried over.
std::vector<Absence> absences_of(const Trace& trace, Simulation& simulation) {
  const std::size_t count = trace.operators.size();
  const SwapPlan on_demand{Demand::kFarthest, {}};
  std::vector<std::uint64_t> left(trace.pages.size(), kNeverUsed);
  std::vector<Absence> absences;
  // The first step begins with everything outside; the second leaves the pages as the third finds them.
  for (std::uint64_t step = 0; step < 3; ++step) {
    simulation.step(on_demand);
    for (const Simulation::Event& event : simulation.events()) {
      if (!event.fault) {
        left[event.page] = event.last_use;
        continue;
      }
      const std::uint64_t since = left[event.page];
      left[event.page] = kNeverUsed;
      if (step < 2 || since == kNeverUsed) continue;
      const std::uint64_t at = step * count + event.op;
      if (at - since >= count + 1) continue;  // unused for more than a step: not of this step's rhythm
      const auto from = static_cast<std::size_t>(since % count);
      absences.push_back({event.page, from, from + static_cast<std::size_t>(at - since)});
    }
  }
  return absences;
}

}  // namespace

SwapPlan plan_farthest(const Trace& trace, std::uint64_t budget_bytes, const SwapSpeeds& speeds) {
  const std::size_t count = trace.operators.size();
  Simulation simulation(trace, budget_bytes, {});
  std::vector<Absence> absences = absences_of(trace, simulation);
  std::vector<std::uint64_t> load = simulation.load();

  SwapPlan plan = empty_plan(trace);
  plan.demand = Demand::kFarthest;
  std::vector<double> began(2 * count + 1, 0);
  for (std::size_t i = 0; i < 2 * count; ++i) began[i + 1] = began[i] + trace.operators[i % count].seconds;

  // The lane in is one: walking back from the last deadline gives the latest moment at which each fetch must
  // start.
  std::sort(absences.begin(), absences.end(),
            [](const Absence& a, const Absence& b) { return a.returned < b.returned; });
  constexpr double kMargin = 1.5;          // transfers and operators both vary
  constexpr double kWakingSeconds = 2e-4;  // until the lane's thread runs, on a machine with other work
  std::vector<double> start_by(absences.size());
  double lane = std::numeric_limits<double>::infinity();
  for (std::size_t i = absences.size(); i-- > 0;) {
    const double needed =
        kMargin * static_cast<double>(trace.pages[absences[i].page].bytes) / speeds.in_bytes_per_second;
    lane = std::min(lane, began[absences[i].returned] - kWakingSeconds) - needed;
    start_by[i] = lane;
  }

  for (std::size_t i = 0; i < absences.size(); ++i) {
    const auto& [page, left, returned] = absences[i];
    const std::uint64_t bytes = trace.pages[page].bytes;
    std::size_t fetch_after = returned - 1;
    while (fetch_after > left && began[fetch_after + 1] > start_by[i] &&
           load[fetch_after % count] + bytes <= budget_bytes) {
      load[fetch_after % count] += bytes;
      --fetch_after;
    }
    plan.after[left].push_back({page, SwapMove::Kind::kEvict});
    plan.after[fetch_after % count].push_back({page, SwapMove::Kind::kFetch});
  }
  // Room is made before it is taken.
  for (std::vector<SwapMove>& moves : plan.after) {
    std::stable_partition(moves.begin(), moves.end(),
                          [](const SwapMove& move) { return move.kind == SwapMove::Kind::kEvict; });
  }
  return plan;
}

}  // namespace reef
