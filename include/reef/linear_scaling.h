#pragma once

#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <vector>

#include "reef/export.h"

namespace reef {

struct LinearScalingOptions {
  double factor = 1;              ///< so many times the batch, and so the rate; 1 or more
  std::int64_t warmup_steps = 0;  ///< in which the rate rises, from what it is, to that
  std::int64_t steps_taken = 0;   ///< of a run that goes on, whose optimizer has its rates
};

/// The linear scaling rule with a gradual warm-up (Goyal et al. 2017, 1706.02677, sections 2.1 and 2.2): with
/// `factor` times the batch, the rate that suits one is multiplied by `factor`, in equal steps over the
/// warm-up. step() after each step of the optimizer multiplies each group's rate by what is due, so that
/// other schedulers may change it, too.
///
/// Momentum correction (section 3, remark 2): the momentum of LibTorch's and Reef's optimizers has no rate in
/// it (u = m u + g, w -= lr u), so a rate that changes counts for all of it at once, and nothing need be
/// corrected. One that has (v = m v + lr g, w -= v) multiplies m by momentum_factor() in the next step, and
/// then makes the same steps.
class REEF_API LinearScaling : public torch::optim::LRScheduler {
 public:
  /// Throws ConfigError for a factor below 1 or that is not finite, and negative numbers of steps. The
  /// optimizer must outlive this.
  LinearScaling(torch::optim::Optimizer& optimizer, const LinearScalingOptions& options);
  /// The last change: the rate over what it was before step(); 1 before the first.
  double momentum_factor() const { return momentum_factor_; }

 private:
  std::vector<double> get_lrs() override;
  double scale_at(std::int64_t step) const;

  LinearScalingOptions options_;
  double momentum_factor_ = 1;
};

}  // namespace reef
