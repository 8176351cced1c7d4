#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "reef/error.h"
#include "reef/tier.h"

namespace reef {

/// What a pager was doing when it found no room.
struct RoomWanted {
  std::string op;  ///< that runs; empty: none
  std::uint64_t budget_bytes = 0;
  std::uint64_t bytes = 0;         ///< of the allocation
  std::uint64_t pinned_bytes = 0;  ///< of pages in use
  std::uint64_t least_bytes = 0;   ///< that would be alive if all went that can
  std::uint64_t step_bytes = 0;    ///< the least budget for all of the step, as far as it is known
};

/// What is in use, and the allocation, exceed the budget.
BudgetError working_set_error(const RoomWanted& wanted);
/// A page of `page_bytes` should leave, and no tier has room for it.
BudgetError no_tier_error(const RoomWanted& wanted, std::uint64_t page_bytes,
                          const std::vector<std::shared_ptr<Tier>>& tiers, std::uint64_t alive_bytes);

}  // namespace reef
