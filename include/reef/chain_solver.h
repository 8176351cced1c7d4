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
  /// program over stages and memory (Beaumont et al., 1911.13214, theorem 1). O(slots L^3) time, 8 slots L^2
  /// / 2 bytes.
  kDynamic,
  /// The least time of all schedules, by search; for at most kExactStages stages.
  kExact,
};
inline constexpr ChainSolver kChainSolvers[] = {ChainSolver::kStoreAll, ChainSolver::kPeriodic,
                                                ChainSolver::kRevolve, ChainSolver::kDynamic,
                                                ChainSolver::kExact};
inline constexpr std::uint32_t kExactStages = 10;
REEF_API std::string_view name(ChainSolver solver);

struct ChainSolverOptions {
  ChainSolver solver = ChainSolver::kDynamic;
  /// kDynamic: into how many parts the budget is cut. Sizes are rounded up to parts, so a schedule always
  /// fits, and more parts find better ones.
  std::uint32_t slots = 500;
  /// kDynamic: on how many threads; 0: as many as there are processors. The result is the same.
  std::uint32_t threads = 0;
};

/// The schedule whose simulated peak is at most `budget_bytes`. Throws BudgetError with the smallest budget
/// for which this solver finds one, and ConfigError (see check(); too many stages for kExact; no slots).
REEF_API Schedule plan_chain(const ChainProfile& profile, std::uint64_t budget_bytes,
                             const ChainSolverOptions& options = {});

/// The least peak of all schedules that keep what they have stored until it has been used, to the byte.
REEF_API std::uint64_t minimum_bytes(const ChainProfile& profile);

/// The peak of kStoreAll: a budget with which nothing is computed twice.
REEF_API std::uint64_t natural_peak_bytes(const ChainProfile& profile);

}  // namespace reef
