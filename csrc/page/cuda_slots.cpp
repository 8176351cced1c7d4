#include "page/cuda_slots.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace reef {
namespace {

// A broken device works on nothing any more.
bool is_reached(const CudaEvent& event) {
  try {
    return event.reached();
  } catch (const c10::Error&) {
    return true;
  }
}

}  // namespace

CudaSlots::~CudaSlots() { finish(); }

// Forgets uses that are over, and returns slots that were given back to their tiers. Returns whether there
// were any. Called with the lock held.
bool CudaSlots::settle() noexcept {
  bool any = false;
  for (auto use = uses_.begin(); use != uses_.end();) {
    auto& [ends, given_back] = use->second;
    std::erase_if(ends, [](const auto& end) { return is_reached(*end); });
    if (!ends.empty()) {
      ++use;
      continue;
    }
    any |= given_back;
    if (given_back) use->first.first->give_back(use->first.second);
    use = uses_.erase(use);
  }
  settle_at_ = std::max(kSettleAtLeast, 2 * uses_.size());
  return any;
}

void CudaSlots::used_until(std::shared_ptr<CudaEvent> end, const std::shared_ptr<Tier>& tier,
                           Tier::Slot slot) {
  const std::lock_guard lock(mutex_);
  if (uses_.size() >= settle_at_) settle();
  uses_[{tier, slot}].ends.push_back(std::move(end));
}

std::optional<Tier::Slot> CudaSlots::take(Tier& tier, std::uint64_t bytes) {
  std::optional<Tier::Slot> slot = tier.take(bytes);
  if (slot) return slot;
  bool returned = false;
  {
    const std::lock_guard lock(mutex_);
    returned = settle();
  }
  if (returned) slot = tier.take(bytes);
  if (!slot && finish()) slot = tier.take(bytes);
  return slot;
}

void CudaSlots::give_back(const std::shared_ptr<Tier>& tier, Tier::Slot slot) noexcept {
  const std::lock_guard lock(mutex_);
  if (const auto use = uses_.find({tier, slot}); use != uses_.end()) {
    use->second.given_back = true;
  } else {
    tier->give_back(slot);
  }
}

bool CudaSlots::finish() noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& [slot, use] : uses_) {
    if (!use.given_back) continue;
    for (const auto& end : use.ends) end->wait();
  }
  return settle();
}

}  // namespace reef
