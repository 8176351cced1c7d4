#include "page/budget_room.h"

namespace reef {

BudgetRoom::~BudgetRoom() {
  if (pager_ != nullptr) pager_->remove(mark_);
}

std::optional<std::int64_t> BudgetRoom::left_bytes() {
  if (pager_ != nullptr) return pager_->left_bytes(mark_);
  return Pager::running(device_) != nullptr ? std::optional<std::int64_t>(0) : std::nullopt;
}

void BudgetRoom::begin() {
  if (pager_ == nullptr) {
    pager_ = Pager::running(device_);
    if (pager_ == nullptr) return;
    pager_->add(mark_);
  }
  pager_->set(mark_);
}

}  // namespace reef
