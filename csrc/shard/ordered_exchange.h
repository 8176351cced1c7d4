#pragma once

#include "distributed/slice_sum.h"
#include "shard/gradient_exchange.h"

namespace reef {

/// The sum (or mean) in the order of ranks, bit for bit that of one process that accumulates. For that order
/// it takes both levels at once: a copy adds to what the copies before it have added up. See SliceSum.
class OrderedExchange final : public GradientExchange {
 public:
  using GradientExchange::GradientExchange;
  void exchange(const GradientBucket& bucket) override;
  void begin_step(std::int64_t step) override;

 private:
  SliceSum sum_{ranks()};
};

}  // namespace reef
