#pragma once

#include <cstdint>
#include <string_view>

#include "reef/export.h"
#include "reef/schedule.h"

namespace reef {

/// How a schedule is chosen.
enum class ChainSolver : std::uint8_t {
  kStoreAll,  ///< every stage keeps its tape: nothing is computed twice
  /// The last output of every k stages is kept, and the stages between are computed once more (Chen et al.,
  /// 1604.06174, section 4.1): the fastest k that fits. The last k keep their tapes.
  kPeriodic,
  /// Griewank and Walther (Algorithm 799): the fewest recomputed stages for a number of kept outputs, as if
  /// all stages were alike; the largest number that fits.
  kRevolve,
  /// The least time of all schedules that keep what they have stored until it has been used: a dynamic
  /// program over stages and memory (Beaumont et al., 1911.13214, theorem 1); where none fits, and there are
  /// at most six stages, of all schedules. O(slots L^3) time, 4 slots L^2 bytes for L stages (up to twice
  /// that where outputs are saved by their own stages alone).
  kDynamic,
  /// The least time of all schedules without transfers, by search; for at most kExactStages stages.
  kExact,
  /// Nothing is computed twice: what does not fit is in the profile's tier from forward to backward, what is
  /// used last first.
  kOffload,
  /// Both (the setting of Beaumont et al., NeurIPS 2021): what kDynamic keeps within larger budgets, and what
  /// of it does not fit into this one in the tier. The fastest by simulate(); never slower than kDynamic and
  /// kOffload, of which the first is what it does without a tier.
  kCombined,
};
inline constexpr ChainSolver kChainSolvers[] = {
    ChainSolver::kStoreAll, ChainSolver::kPeriodic, ChainSolver::kRevolve, ChainSolver::kDynamic,
    ChainSolver::kExact,    ChainSolver::kOffload,  ChainSolver::kCombined};
inline constexpr std::uint32_t kExactStages = 10;
REEF_API std::string_view name(ChainSolver solver);

struct ChainSolverOptions {
  ChainSolver solver = ChainSolver::kCombined;
  /// kDynamic, kCombined: into how many parts the budget is cut. Sizes are rounded up to parts, so a schedule
  /// always fits, and more parts find better ones.
  std::uint32_t slots = 500;
  /// kDynamic, kCombined: on how many threads; 0: as many as there are processors. The result is the same.
  std::uint32_t threads = 0;
};

/// The schedule whose simulated peak is at most `budget_bytes`. Throws BudgetError with the smallest budget
/// for which this solver finds one, and ConfigError (see check(); too many stages for kExact; no slots).
REEF_API Schedule plan_chain(const ChainProfile& profile, std::uint64_t budget_bytes,
                             const ChainSolverOptions& options = {});

/// The least peak of all schedules that keep what they have stored until it has been used, to the byte; of
/// all schedules, for chains of at most six stages. Without transfers.
REEF_API std::uint64_t minimum_bytes(const ChainProfile& profile);

/// The peak of kStoreAll: a budget with which nothing is computed twice.
REEF_API std::uint64_t natural_peak_bytes(const ChainProfile& profile);

}  // namespace reef
