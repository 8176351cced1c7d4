#pragma once

#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "gathered_room.h"
#include "page/budget_room.h"
#include "shard/dtypes.h"
#include "shard/flat_bucket.h"

namespace reef {

/// How many bytes of gathered parameters may stay in memory: what steps leave free of the device's budget.
/// Ranks that tell each other what fits in theirs, and take the least, have the same room.
class MeasuredRoom {
 public:
  /// For parameters in these buckets.
  MeasuredRoom(c10::Device device, const std::vector<FlatBucket>& buckets,
               const std::optional<MixedPrecision>& mixed)
      : room_(bytes_of(buckets)), budget_room_(device) {
    for (const FlatBucket& bucket : buckets) {
      const std::size_t sum_bytes = c10::elementSize(dtypes_of(bucket.dtype(), mixed).sum);
      most_sums_bytes_ = std::max(most_sums_bytes_, bucket.elements() * static_cast<std::int64_t>(sum_bytes));
    }
  }

  std::int64_t bytes() const { return room_.bytes(); }
  /// So many are in memory now.
  void gathered(std::int64_t bytes) { most_gathered_bytes_ = std::max(most_gathered_bytes_, bytes); }
  /// What would have fitted in this step; see GatheredRoom.
  std::int64_t fitting_bytes() {
    const std::int64_t left = budget_room_.left_bytes().value_or(kNoBudget);
    if (left < 0 || left == kNoBudget) return left;
    return most_gathered_bytes_ + std::max<std::int64_t>(left - most_sums_bytes_, 0);
  }
  /// The next step begins; of the ranks so much has fitted.
  void begin_step(std::int64_t fitting_bytes) {
    fitting_bytes == kNoBudget ? room_.close() : room_.after_step(fitting_bytes);
    budget_room_.begin();
    most_gathered_bytes_ = 0;
  }

 private:
  static constexpr std::int64_t kNoBudget = std::numeric_limits<std::int64_t>::max();

  static std::int64_t bytes_of(const std::vector<FlatBucket>& buckets) {
    std::int64_t all = 0;
    for (const FlatBucket& bucket : buckets) all += bucket.bytes();
    return all;
  }

  /// Of a bucket's gradients: whether these are still on their way when the next are made differs from step
  /// to step, so their room is left free.
  std::int64_t most_sums_bytes_ = 0;
  std::int64_t most_gathered_bytes_ = 0;  ///< at any time of this step
  GatheredRoom room_;
  BudgetRoom budget_room_;
};

}  // namespace reef
