#include "reef/chain_solver.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "chain/solvers.h"
#include "reef/bytes.h"
#include "reef/error.h"

namespace reef {
namespace {

/// A search of shorter chains takes no time to speak of.
constexpr std::size_t kSearchedStages = 6;

[[noreturn]] void refuse(ChainSolver solver, std::uint64_t budget_bytes, std::uint64_t smallest) {
  throw BudgetError("plan_chain: out of memory. The smallest peak of solver '" + std::string(name(solver)) +
                        "' for this chain is " + std::to_string(smallest) + " bytes (" +
                        format_bytes(static_cast<std::int64_t>(smallest)) + "), and the budget is " +
                        std::to_string(budget_bytes) + "; give that many, or make batches smaller",
                    smallest);
}

Schedule fastest(const ChainProfile& profile, std::uint64_t budget_bytes, ChainSolver solver,
                 std::vector<Schedule> candidates) {
  std::uint64_t smallest = std::numeric_limits<std::uint64_t>::max();
  double seconds = std::numeric_limits<double>::infinity();
  Schedule* best = nullptr;
  for (Schedule& candidate : candidates) {
    const ScheduleCost cost = simulate(profile, candidate);
    smallest = std::min(smallest, cost.peak_bytes);
    if (cost.peak_bytes > budget_bytes || cost.seconds >= seconds) continue;
    seconds = cost.seconds;
    best = &candidate;
  }
  if (best == nullptr) refuse(solver, budget_bytes, smallest);
  return std::move(*best);
}

std::vector<Schedule> periodic_schedules(std::uint32_t stages) {
  std::vector<Schedule> schedules;
  for (std::uint32_t period = 1; period <= stages; ++period) {
    schedules.push_back(periodic_schedule(stages, period));
  }
  return schedules;
}

Schedule store_all(const ChainProfile& profile) {
  const auto stages = static_cast<std::uint32_t>(profile.stages.size());
  return periodic_schedule(stages, stages);
}

// What dynamic programming does not see fits into less in a few chains, which a search may find.
Schedule search(const ChainProfile& profile, std::uint64_t budget_bytes, ChainSolver solver) {
  if (auto found = exact_schedule(profile, budget_bytes)) return std::move(*found);
  refuse(solver, budget_bytes, exact_minimum_bytes(profile));
}

// Rounding may hide what fits: then with finer slots, as far as a table of them is affordable, and at last
// what needs least.
Schedule dynamic(const ChainProfile& profile, std::uint64_t budget_bytes, ChainSolverOptions options) {
  LeastPeak least = least_peak(profile);
  if (least.bytes > budget_bytes && profile.stages.size() <= kSearchedStages)
    return search(profile, budget_bytes, ChainSolver::kDynamic);
  if (least.bytes > budget_bytes) refuse(ChainSolver::kDynamic, budget_bytes, least.bytes);
  const std::uint64_t stages = profile.stages.size() + 1;
  constexpr std::uint64_t kTableBytes = std::uint64_t{1} << 30;
  const std::uint32_t asked = options.slots;
  while (true) {
    if (auto found = dynamic_schedule(profile, budget_bytes, options)) return std::move(*found);
    options.slots *= 4;
    const bool affordable = stages * stages * options.slots * sizeof(double) / 2 <= kTableBytes;
    if (!affordable || options.slots > 64 * asked || options.slots / 4 > budget_bytes)
      return std::move(least.schedule);
  }
}

// What is best kept depends on what can be moved beside it, and the other way round: schedules for all larger
// budgets are made to fit by transfers, and simulate() chooses.
Schedule combined(const ChainProfile& profile, std::uint64_t budget_bytes,
                  const ChainSolverOptions& options) {
  if (profile.tier_speed.bytes_per_second == 0) return dynamic(profile, budget_bytes, options);
  constexpr std::size_t kCandidates = 64;
  std::vector<Schedule> candidates;
  const std::uint64_t minimum = minimum_bytes(profile);
  if (minimum <= budget_bytes) candidates.push_back(dynamic(profile, budget_bytes, options));
  std::vector<Schedule> larger = dynamic_schedules(profile, options, kCandidates);
  larger.push_back(store_all(profile));
  larger.push_back(least_peak(profile).schedule);
  for (const Schedule& schedule : larger) {
    if (auto moved = with_transfers(profile, schedule, budget_bytes)) candidates.push_back(std::move(*moved));
  }
  if (!candidates.empty())
    return fastest(profile, budget_bytes, ChainSolver::kCombined, std::move(candidates));
  std::uint64_t smallest = minimum;
  for (const Schedule& schedule : larger) {
    smallest = std::min(smallest, least_with_transfers(profile, schedule));
  }
  refuse(ChainSolver::kCombined, budget_bytes, smallest);
}

Schedule offload(const ChainProfile& profile, std::uint64_t budget_bytes) {
  const Schedule all = store_all(profile);
  if (auto moved = with_transfers(profile, all, budget_bytes)) return std::move(*moved);
  refuse(ChainSolver::kOffload, budget_bytes, least_with_transfers(profile, all));
}

// Without what is there whatever the schedule.
Schedule planned(const ChainProfile& profile, std::uint64_t budget_bytes, const ChainSolverOptions& options) {
  const auto stages = static_cast<std::uint32_t>(profile.stages.size());
  switch (options.solver) {
    case ChainSolver::kStoreAll:
      return fastest(profile, budget_bytes, options.solver, {store_all(profile)});
    case ChainSolver::kPeriodic:
      return fastest(profile, budget_bytes, options.solver, periodic_schedules(stages));
    case ChainSolver::kRevolve:
      return fastest(profile, budget_bytes, options.solver, revolve_schedules(stages));
    case ChainSolver::kDynamic:
      return dynamic(profile, budget_bytes, options);
    case ChainSolver::kOffload:
      return offload(profile, budget_bytes);
    case ChainSolver::kCombined:
      return combined(profile, budget_bytes, options);
    case ChainSolver::kExact:
      break;
  }
  if (stages > kExactStages) {
    throw ConfigError("plan_chain: solver 'exact' searches all schedules, which " + std::to_string(stages) +
                      " stages have too many of; at most " + std::to_string(kExactStages) +
                      ", or use solver 'dynamic'");
  }
  return search(profile, budget_bytes, options.solver);
}

}  // namespace

std::string_view name(ChainSolver solver) {
  switch (solver) {
    case ChainSolver::kStoreAll:
      return "store_all";
    case ChainSolver::kPeriodic:
      return "periodic";
    case ChainSolver::kRevolve:
      return "revolve";
    case ChainSolver::kDynamic:
      return "dynamic";
    case ChainSolver::kExact:
      return "exact";
    case ChainSolver::kOffload:
      return "offload";
    case ChainSolver::kCombined:
      return "combined";
  }
  throw ConfigError("there is no such chain solver; use one of kChainSolvers");
}

Schedule plan_chain(const ChainProfile& profile, std::uint64_t budget_bytes,
                    const ChainSolverOptions& options) {
  check(profile);
  if (options.slots == 0) throw ConfigError("plan_chain: 0 slots hold nothing; give 500, say");
  ChainProfile movable = profile;
  const std::uint64_t stays = std::exchange(movable.state_bytes, 0);
  try {
    return planned(movable, budget_bytes - std::min(budget_bytes, stays), options);
  } catch (const BudgetError& error) {
    refuse(options.solver, budget_bytes, error.smallest_budget_bytes() + stays);
  }
}

std::uint64_t minimum_bytes(const ChainProfile& profile) {
  check(profile);
  return profile.state_bytes + (profile.stages.size() <= kSearchedStages ? exact_minimum_bytes(profile)
                                                                         : least_peak(profile).bytes);
}

std::uint64_t natural_peak_bytes(const ChainProfile& profile) {
  check(profile);
  return simulate(profile, store_all(profile)).peak_bytes;
}

}  // namespace reef
