#include "page/pager_errors.h"

#include <algorithm>

#include "reef/bytes.h"

namespace reef {
namespace {

std::string text_of(std::uint64_t bytes) { return format_bytes(static_cast<std::int64_t>(bytes)); }

std::string running(const RoomWanted& wanted) {
  return wanted.op.empty() ? "outside any operator" : "operator " + wanted.op;
}

// Programs that lower their batch size when memory is short recognize LibTorch's errors by these words
// (Lightning's is_oom_error, accelerate's find_executable_batch_size).
std::string in_torchs_words(const RoomWanted& wanted) {
  return wanted.device.is_cpu() ? " [DefaultCPUAllocator: can't allocate memory]" : " [CUDA out of memory]";
}

}  // namespace

BudgetError working_set_error(const RoomWanted& wanted) {
  const std::uint64_t own = wanted.pinned_bytes + wanted.bytes;
  const std::uint64_t least = std::max(wanted.least_bytes, wanted.step_bytes);
  return BudgetError(running(wanted) + " is out of memory. It works on " + text_of(own) +
                         " of pages at once, and " + text_of(wanted.least_bytes - own) +
                         " of other memory is alive that cannot leave, in a budget of " +
                         text_of(wanted.budget_bytes) + "; give at least " + std::to_string(least) +
                         " bytes" + (least > wanted.least_bytes ? ", which the step needs elsewhere" : "") +
                         " (Budget::set_bytes, or a new budget)" + in_torchs_words(wanted),
                     least);
}

BudgetError went_on_error(const std::string& op, const std::exception_ptr& refused) {
  std::string refusal;
  std::uint64_t least = 0;
  try {
    std::rethrow_exception(refused);
  } catch (const BudgetError& error) {
    refusal = message_of(error);
    least = error.smallest_budget_bytes();
  } catch (const std::exception& error) {
    refusal = message_of(error);
  }
  return BudgetError("operator " + op +
                         " was refused memory and went on with less of it, by another algorithm, so what it "
                         "has computed may differ from what it is without a budget; repeat the step with "
                         "more: " +
                         refusal,
                     least);
}

BudgetError no_tier_error(const RoomWanted& wanted, std::uint64_t page_bytes,
                          const std::vector<std::shared_ptr<Tier>>& tiers, std::uint64_t alive_bytes) {
  std::string full;
  for (const auto& tier : tiers) {
    const TierUse use = tier->use();
    full += (full.empty() ? "" : ", ") + tier->name() + " " + text_of(use.used_bytes) + " of " +
            text_of(use.capacity_bytes);
  }
  return BudgetError(running(wanted) + " is out of memory. A page of " + text_of(page_bytes) +
                         " must leave, and no tier has room for it (" + full +
                         "); give a larger tier, or one more (a disk)" + in_torchs_words(wanted),
                     alive_bytes);
}

}  // namespace reef
