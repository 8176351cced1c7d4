#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "reef/export.h"
#include "reef/trace.h"

namespace reef {

/// Pure data and pure code (no Torch): which pages leave memory and come back, when, and what that costs. The
/// budget executes a SwapPlan as it stands; the simulator prices one for any budget without running anything.

/// Which page leaves when room is wanted and the plan has left none.
enum class Demand : std::uint8_t {
  kRecency,   ///< the one unused for longest: all that can be known before the first step is over
  kFarthest,  ///< the one whose next use is farthest ahead (Belady 1966): fewest faults for pages of one size
};

struct SwapMove {
  enum class Kind : std::uint8_t { kEvict, kFetch };
  std::uint32_t page = 0;
  Kind kind = Kind::kEvict;
};

struct SwapPlan {
  Demand demand = Demand::kRecency;
  /// after[i]: moves that start when operator i has run, in order. An eviction of a page that is not in
  /// memory and a fetch of one that is, or for which there is no free room, are passed over: a plan is never
  /// a reason to fail.
  std::vector<std::vector<SwapMove>> after;
};

/// How fast pages move, one lane out and one lane in, each one page at a time.
struct SwapSpeeds {
  double out_bytes_per_second = std::numeric_limits<double>::infinity();
  double in_bytes_per_second = std::numeric_limits<double>::infinity();
};

/// Rules for making a plan. The last four are those of published systems, for comparison.
enum class SwapPolicy : std::uint8_t {
  kRecency,   ///< no plan: evict the least recently used on demand, fetch on demand
  kFarthest,  ///< evict the farthest next use right after its last use, fetch as early as memory allows
  kVdnn,      ///< Rhu et al. 2016: evict what forward leaves for backward, fetch one layer ahead
  kTflms,     ///< Le et al. 2018: evict over gaps longer than a threshold, fetch a fixed number of operators
              ///< ahead
  kAutoSwap,  ///< Zhang et al. 2019: by bytes times time absent, until the load is below the budget
  kCapuchin,  ///< Peng et al. 2020: by slack between gap and transfer time, until the excess is covered
};
inline constexpr SwapPolicy kSwapPolicies[] = {SwapPolicy::kRecency,  SwapPolicy::kFarthest,
                                               SwapPolicy::kVdnn,     SwapPolicy::kTflms,
                                               SwapPolicy::kAutoSwap, SwapPolicy::kCapuchin};
REEF_API std::string_view name(SwapPolicy policy);

/// Makes the plan of `policy` for a step that repeats. Throws ConfigError if `budget_bytes` <
/// minimum_bytes(trace) or the trace is not sound (see check()). Cost: O(operators x pages alive) at worst.
REEF_API SwapPlan plan_swaps(const Trace& trace, std::uint64_t budget_bytes, SwapPolicy policy,
                             const SwapSpeeds& speeds = {});

/// What one step costs when the step before it was the same.
struct SwapCost {
  std::uint64_t faults = 0;     ///< pages that an operator had to wait for
  std::uint64_t fetches = 0;    ///< pages brought back ahead of their use
  std::uint64_t evictions = 0;  ///< pages that left
  std::uint64_t bytes_in = 0;   ///< faults and fetches
  std::uint64_t bytes_out = 0;  ///< evictions of pages whose copy outside was stale; a clean page leaves free
  std::uint64_t peak_bytes = 0;  ///< pages, scratch, and pages on their way
  double seconds = 0;            ///< of the step
  double stalled_seconds = 0;    ///< of these, waiting for pages or for room
};

/// Prices `plan` at `budget_bytes`. Throws as plan_swaps does.
REEF_API SwapCost simulate(const Trace& trace, const SwapPlan& plan, std::uint64_t budget_bytes,
                           const SwapSpeeds& speeds = {});

}  // namespace reef
