#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

#include "page/pager.h"
#include "page/peaks.h"

namespace reef {

/// What a device's budget leaves free over a stretch of time.
class BudgetRoom {
 public:
  explicit BudgetRoom(c10::Device device) : device_(device) {}
  ~BudgetRoom();
  BudgetRoom(const BudgetRoom&) = delete;
  BudgetRoom& operator=(const BudgetRoom&) = delete;

  /// Bytes that were free when most was alive, since begin(); negative: bytes of the pages that have left
  /// since then. 0 if the budget has come later. Nothing: none is in force.
  std::optional<std::int64_t> left_bytes();
  void begin();

 private:
  c10::Device device_;
  Pager* pager_ = nullptr;  ///< that knows our mark
  PeakMark mark_;
};

}  // namespace reef
