#pragma once

#include "shard/lossy_exchange.h"

namespace reef {

/// The exchange of 1-bit Adam (Tang et al., 2102.02888, algorithm 1). In the warm-up, the first
/// `warmup_steps` that ranks use, it gives the mean gradient, bit for bit as without compression, and each
/// rank remembers the momentum of its slice. From then on it gives the momentum m: each rank's beta1 m + (1 -
/// beta1) g with what was held back before travels as signs and mean magnitudes of 512 elements; the owner of
/// a slice adds up what has come, adds what it has held back of sums, and sends that as signs once more. All
/// ranks then have the same m, whole, at every stage: the next step begins with it.
///
/// The first step after the warm-up begins with an all-gather of the momentum. Each later step sends 2 (P -
/// 1) codes of a slice, of 68 bytes for each 512 elements. With copies the sum of a copy's momentum is made
/// as SliceSum makes it, of a slice, whose code goes to each other copy and is decoded there: nothing is
/// gathered, and there is no second rounding. One rank alone gives its own momentum, not rounded.
///
/// Of float32 on the CPU, and means. A block that is not finite arrives as NaN; of its elements the momentum
/// stays as it was, and what was held back is lost.
class OneBitAdamExchange final : public LossyExchange {
 public:
  OneBitAdamExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options);
  void exchange(const GradientBucket& bucket) override;
  void end_step(bool used) override;
  bool gives_momentum() const override;

  static constexpr double kBeta1 = 0.9;

 private:
  static ExchangeMemory momentum_and_residuals(const ProcessGroupPtr& group, int slices,
                                               const ShardOptions& options);
  void follow(const GradientBucket& bucket);
  void gather_momentum(const GradientBucket& bucket);
  at::Tensor momentum_before(const GradientBucket& bucket, const at::Tensor& like) const;
  at::Tensor momentum_of_ranks(const at::Tensor& before, const at::Tensor& gradient, int ranks) const;
  void remember_momentum(const GradientBucket& bucket, const at::Tensor& before, const at::Tensor& now);
  at::Tensor code_of(const GradientBucket& bucket, const char* residual, const at::Tensor& values,
                     std::int64_t first, int slices);
  at::Tensor between_copies(const GradientBucket& bucket);
  at::Tensor between_ranks(const GradientBucket& bucket);

  std::int64_t warmup_steps_;
  double beta1_;
};

}  // namespace reef
