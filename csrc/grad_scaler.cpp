#include "reef/grad_scaler.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <string>
#include <utility>

#include "distributed/sum_over_ranks.h"
#include "given_momentum.h"
#include "kernels/count_nonfinite.h"
#include "reef/error.h"

namespace reef {

using at::Tensor;

namespace {

void require(bool holds, const std::string& sentence) {
  if (!holds) throw ConfigError("GradScaler: " + sentence);
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options, ProcessGroupPtr group)
    : options_(options), group_(std::move(group)), scale_(options.init_scale) {
  require(options.init_scale > 0, "init_scale is not positive; give 65536, say");
  require(options.growth_factor > 1, "growth_factor is not above 1; give 2, say");
  require(options.backoff_factor > 0 && options.backoff_factor < 1,
          "backoff_factor is not between 0 and 1; give 0.5, say");
  require(options.growth_interval > 0, "growth_interval is not positive; give 2000 steps, say");
}

Tensor GradScaler::scale(const Tensor& loss) const { return loss * scale_; }

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  require(!seen_.contains(&optimizer), "gradients of this optimizer have been unscaled; call update() first");
  seen(optimizer);
}

// All gradients are looked at before one is changed.
GradScaler::Seen& GradScaler::seen(torch::optim::Optimizer& optimizer) {
  if (const auto found = seen_.find(&optimizer); found != seen_.end()) return found->second;
  const at::NoGradGuard no_grad;
  std::vector<Tensor> gradients;
  c10::Device device = c10::kCPU;
  for (const auto& group : optimizer.param_groups()) {
    for (const Tensor& parameter : group.params()) {
      refuse_momentum("GradScaler", parameter);
      const Tensor& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      require(gradient.layout() == c10::kStrided,
              "a gradient is sparse; make its layer dense (sparse=False)");
      require(gradient.scalar_type() != at::kHalf,
              "a gradient is float16, in which it cannot be unscaled; keep float32 parameters, or bfloat16");
      gradients.push_back(gradient);
      device = gradient.device();
    }
  }
  std::int64_t nonfinite = kernels::count_nonfinite(gradients);
  nonfinite = sum_over_ranks(at::full({1}, nonfinite, at::kLong), device, group_).item<std::int64_t>();
  for (const Tensor& gradient : gradients) gradient.mul_(1 / scale_);
  return seen_.emplace(&optimizer, Seen{nonfinite == 0}).first->second;
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  Seen& found = seen(optimizer);
  require(!found.stepped, "this optimizer has been stepped; call update() first");
  found.stepped = true;
  if (found.finite) optimizer.step();
  return found.finite;
}

void GradScaler::update() {
  require(!seen_.empty(), "update() before any step; call step(optimizer) first");
  bool finite = true;
  for (const auto& [optimizer, found] : std::exchange(seen_, {})) finite &= found.finite;
  if (!finite) {
    scale_ *= options_.backoff_factor;
    growing_ = 0;
  } else if (++growing_ == options_.growth_interval) {
    scale_ *= options_.growth_factor;
    growing_ = 0;
  }
}

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("scale", scale_);
  archive.write("growing", growing_);
}

void GradScaler::load(torch::serialize::InputArchive& archive) {
  c10::IValue scale;
  c10::IValue growing;
  archive.read("scale", scale);
  archive.read("growing", growing);
  scale_ = scale.toDouble();
  growing_ = growing.toInt();
  seen_.clear();
}

}  // namespace reef
