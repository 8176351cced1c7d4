#pragma once

#include "shard/gradient_exchange.h"

namespace reef {

/// The backend's own reduce-scatter or all-reduce, among all ranks, which are one copy. Its order of
/// additions is the backend's. Sent bytes are what a ring would send.
class NativeExchange final : public GradientExchange {
 public:
  using GradientExchange::GradientExchange;
  void exchange(const GradientBucket& bucket) override;
  /// A backend has one order of collectives.
  bool in_any_order(c10::Device) const override { return false; }

 private:
  void reduce_scatter(const GradientBucket& bucket);
  void all_reduce(const at::Tensor& flat);
};

}  // namespace reef
