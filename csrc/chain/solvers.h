#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "reef/chain_profile.h"
#include "reef/chain_solver.h"
#include "reef/schedule.h"

namespace reef {

/// For a chain of so many stages, whatever they cost. The last `period` stages at most keep their tapes; with
/// a period of all stages, all do.
Schedule periodic_schedule(std::uint32_t stages, std::uint32_t period);
/// By the number of outputs that are kept at the same time, the chain's input among them, from 1.
std::vector<Schedule> revolve_schedules(std::uint32_t stages);

/// The fewest forward steps that revolve `steps` with `checkpoints` kept, the input among them, without the
/// one of each step that is gone back from: r l - C(c + r, r - 1), where C(c + r - 1, c) < l <= C(c + r, c).
std::uint64_t revolve_steps(std::uint64_t steps, std::uint64_t checkpoints);

/// nullopt: nothing fits when sizes are rounded up to slots.
std::optional<Schedule> dynamic_schedule(const ChainProfile& profile, std::uint64_t budget_bytes,
                                         const ChainSolverOptions& options);

/// By dynamic programming within all budgets up to what nothing is recomputed with, in so many steps: those
/// that differ in time, thinned out to `most`.
std::vector<Schedule> dynamic_schedules(const ChainProfile& profile, const ChainSolverOptions& options,
                                        std::size_t most);

/// `schedule`, which has none, with transfers by which it keeps to the budget: what is not used for longest
/// leaves. nullopt: that is not enough, or the tier does not hold it.
std::optional<Schedule> with_transfers(const ChainProfile& profile, const Schedule& schedule,
                                       std::uint64_t budget_bytes);
/// The least budget for which there are.
std::uint64_t least_with_transfers(const ChainProfile& profile, const Schedule& schedule);

/// The least peak of persistent schedules, and one that has it.
struct LeastPeak {
  std::uint64_t bytes = 0;
  Schedule schedule;
};
LeastPeak least_peak(const ChainProfile& profile);

/// nullopt: nothing fits.
std::optional<Schedule> exact_schedule(const ChainProfile& profile, std::uint64_t budget_bytes);
/// The least peak of all schedules.
std::uint64_t exact_minimum_bytes(const ChainProfile& profile);

}  // namespace reef
