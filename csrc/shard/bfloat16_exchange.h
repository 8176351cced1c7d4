#pragma once

#include "distributed/slice_sum.h"
#include "shard/gradient_exchange.h"

namespace reef {

/// The sum (or mean) of gradients that travel as bfloat16, half the bytes of float32. What rounding takes
/// from a gradient is remembered as its `residual`, and added to the next one, so nothing is lost: what has
/// been applied in all steps, and all ranks' residuals, are what all ranks had. What has arrived is added up
/// in the order of ranks and in the bucket's dtype. Where nothing is divided the sum is rounded once more, to
/// be sent back, and what that takes is the `residual_of_sum` of the rank that has added it up. With copies,
/// a copy's sum is made as SliceSum makes it, and only what leaves it is rounded: all copies' slices are sent
/// to each. Buckets of bfloat16 are added up as they are.
///
/// A residual is finite: what is not, or is too large for bfloat16, arrives as an infinity or NaN, and takes
/// what was held back for that element with it.
class Bfloat16Exchange final : public GradientExchange {
 public:
  Bfloat16Exchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options);
  void exchange(const GradientBucket& bucket) override;
  void begin_step(std::int64_t step) override;

 private:
  at::Tensor rounded(std::size_t bucket, const char* name, const at::Tensor& values);
  void take(std::size_t bucket, const char* name, const at::Tensor& values);
  void between_copies(const GradientBucket& bucket);
  void between_ranks(const GradientBucket& bucket);

  SliceSum sum_{ranks()};
};

}  // namespace reef
