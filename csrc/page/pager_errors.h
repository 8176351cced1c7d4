#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "reef/error.h"
#include "reef/tier.h"

namespace reef {

/// The situation in which a pager found no room.
struct RoomWanted {
  std::string op;  ///< the running operator, or empty
  c10::Device device = c10::kCPU;
  std::uint64_t budget_bytes = 0;
  std::uint64_t bytes = 0;         ///< the size of the allocation that found no room
  std::uint64_t pinned_bytes = 0;  ///< bytes of pages in use
  std::uint64_t least_bytes = 0;   ///< bytes that would be alive if every page left that can
  std::uint64_t step_bytes = 0;    ///< the least budget for the whole step, as far as it is known
};

/// Makes the error for a working set that exceeds the budget.
BudgetError working_set_error(const RoomWanted& wanted);
/// Makes the error for an operator whose allocation failed with `refused` and that went on with less memory.
BudgetError went_on_error(const std::string& op, const std::exception_ptr& refused);
/// Makes the error for a page of `page_bytes` that should leave but for which no tier has room.
BudgetError no_tier_error(const RoomWanted& wanted, std::uint64_t page_bytes,
                          const std::vector<std::shared_ptr<Tier>>& tiers, std::uint64_t alive_bytes);

}  // namespace reef
