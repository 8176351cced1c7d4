#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

#include "page/pager.h"
#include "page/peaks.h"

namespace reef {

/// Measures what a device's budget leaves free over a stretch of time.
class BudgetRoom {
 public:
  explicit BudgetRoom(c10::Device device) : device_(device) {}
  ~BudgetRoom();
  BudgetRoom(const BudgetRoom&) = delete;
  BudgetRoom& operator=(const BudgetRoom&) = delete;

  /// Returns how many bytes were free when most was alive since begin(); if pages have left since, minus
  /// their bytes. Returns 0 if the budget began later, and nothing if none is in force.
  std::optional<std::int64_t> left_bytes();
  void begin();

 private:
  c10::Device device_;
  Pager* pager_ = nullptr;  ///< that knows our mark
  PeakMark mark_;
};

}  // namespace reef
