#include "reef/linear_scaling.h"

#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "reef/error.h"

namespace reef {

LinearScaling::LinearScaling(torch::optim::Optimizer& optimizer, const LinearScalingOptions& options)
    : LRScheduler(optimizer), options_(options) {
  if (!std::isfinite(options.factor) || options.factor < 1) {
    throw ConfigError("LinearScaling was given factor " + std::to_string(options.factor) +
                      ": give how many times the batch is larger, 1 or more.");
  }
  if (options.warmup_steps < 0 || options.steps_taken < 0) {
    throw ConfigError("LinearScaling was given warmup_steps " + std::to_string(options.warmup_steps) +
                      " and steps_taken " + std::to_string(options.steps_taken) + ": give 0 or more.");
  }
  if (options.steps_taken > 0) return;
  for (torch::optim::OptimizerParamGroup& group : optimizer.param_groups())
    group.options().set_lr(group.options().get_lr() * scale_at(0));
}

double LinearScaling::scale_at(std::int64_t step) const {
  const double risen =
      options_.warmup_steps == 0
          ? 1
          : std::min(1.0, static_cast<double>(step) / static_cast<double>(options_.warmup_steps));
  return 1 + (options_.factor - 1) * risen;
}

std::vector<double> LinearScaling::get_lrs() {
  const std::int64_t step = options_.steps_taken + static_cast<std::int64_t>(step_count_);
  momentum_factor_ = scale_at(step + 1) / scale_at(step);
  std::vector<double> rates = get_current_lrs();
  for (double& rate : rates) rate *= momentum_factor_;
  return rates;
}

}  // namespace reef
