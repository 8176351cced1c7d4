#pragma once

#include "shard/top_k_exchange.h"

namespace reef {

/// Deep Gradient Compression (Lin et al., 1712.01887, sections 3.2 and 3.3). Of a rank's gradient g, its
/// momentum u and its residual v become
///     u = momentum * u + g,   v = v + u   (momentum correction),
/// the largest elements of v go to all ranks as TopKExchange sends them, and where one is sent v and u become
/// zero (momentum factor masking). Each product and sum is rounded by itself. The density's schedule is the
/// warm-up. With `max_norm`, g is scaled first: what it adds to the sum, or to the mean, has a norm of
/// max_norm / sqrt(P) at most, P being the number of those that exchange what they take (local gradient
/// clipping). The norm is that of the bucket; with copies that of what a copy has added up, whose ranks tell
/// each other 552 bytes for it.
///
/// So what has been applied in all steps and all ranks' residuals are what all momenta were in these steps,
/// before they were masked. A gradient that is sent n steps later, the step itself being one, has been added
/// 1 + momentum + ... + momentum^(n - 1) times. With density 1 that is once: everything is sent and masked at
/// once, and nothing of a momentum is left. Where there is one rank nothing waits, so nothing is masked, and
/// what is applied is u: SGD with momentum, bit for bit.
///
/// Of float32; shard() refuses others. What is not finite is sent, and held back neither in v nor
/// in u. Memory: u and v, each the gradient's bytes, twice while a step is under way.
class DgcExchange final : public TopKExchange {
 public:
  DgcExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options);

 private:
  at::Tensor addend(std::size_t bucket, const at::Tensor& gradient, const RanksAmong& among) override;
  void added(std::size_t bucket, const at::Tensor& addend, const SparseGradient& taken) override;
  double clipping(const at::Tensor& gradient, const RanksAmong& among);

  StepSchedule momentum_, max_norm_;
};

}  // namespace reef
