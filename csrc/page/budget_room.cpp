#include "page/budget_room.h"

namespace reef {

BudgetRoom::~BudgetRoom() {
  if (pager_ != nullptr) pager_->remove(mark_);
}

std::optional<std::int64_t> BudgetRoom::left_bytes() {
  if (pager_ == nullptr) {
    pager_ = Pager::running(device_);
    if (pager_ == nullptr) return std::nullopt;
    pager_->add(mark_);
  }
  return pager_->left_bytes(mark_);
}

}  // namespace reef
