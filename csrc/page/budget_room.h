#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

#include "page/pager.h"
#include "page/peaks.h"

namespace reef {

/// Measures how much of a device's budget stays free over a period of time.
class BudgetRoom {
 public:
  explicit BudgetRoom(c10::Device device) : device_(device) {}
  ~BudgetRoom();
  BudgetRoom(const BudgetRoom&) = delete;
  BudgetRoom& operator=(const BudgetRoom&) = delete;

  /// Returns how many bytes were free at the peak since begin(), less the bytes of pages that have been
  /// evicted since. Returns 0 if the budget began after begin(), and nothing if no budget is in force.
  std::optional<std::int64_t> left_bytes();
  void begin();

 private:
  c10::Device device_;
  Pager* pager_ = nullptr;  ///< the pager that updates `mark_`
  PeakMark mark_;
};

}  // namespace reef
