#pragma once

#include <cstdint>
#include <vector>

#include "reef/swap.h"
#include "reef/trace.h"

namespace reef {

/// A stretch of the step over which a page is alive and unused: what a planner chooses among.
struct Gap {
  std::uint32_t page;
  std::size_t from;  ///< operator after which it begins
  std::size_t to;    ///< operator that ends it; >= the number of operators: in the following step
  std::uint64_t bytes;
  double seconds;  ///< run time of the operators between
};

/// Every gap with at least one operator inside.
std::vector<Gap> gaps_of(const Trace& trace);
/// Of each page that does not persist, the longest.
std::vector<Gap> longest_gaps(const Trace& trace);

SwapPlan empty_plan(const Trace& trace);
/// Evicts over `gap`; the fetch starts when operator `fetch_after`, in [from, to), has run.
void add(SwapPlan& plan, const Gap& gap, std::size_t fetch_after);
/// The last operator of the gap after which a fetch is still in time.
std::size_t fetch_in_time(const Trace& trace, const Gap& gap, const SwapSpeeds& speeds);

SwapPlan plan_farthest(const Trace& trace, std::uint64_t budget_bytes, const SwapSpeeds& speeds);

}  // namespace reef
