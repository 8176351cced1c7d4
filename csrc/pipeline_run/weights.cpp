#include "pipeline_run/weights.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <utility>

#include "reef/error.h"

namespace reef {

using at::Tensor;

PipelineWeights::PipelineWeights(std::vector<Tensor> parameters, std::vector<PipelineVersion> versions,
                                 std::uint32_t passes_backward, bool in_place)
    : parameters_(std::move(parameters)), versions_(std::move(versions)), in_place_(in_place) {
  first_ = values_now();
  if (in_place_) return;
  for (const PipelineVersion& version : versions_) {
    ++passes_left_[version.forward];
    passes_left_[version.backward] += passes_backward;
  }
}

PipelineWeights::Values PipelineWeights::values_now() const {
  Values values;
  for (const Tensor& parameter : parameters_)
    values.push_back({parameter.variable_data(), parameter.unsafeGetTensorImpl()->version_counter()});
  return values;
}

void PipelineWeights::put(const Values& values) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].set_data(values[i].data);
    parameters_[i].unsafeGetTensorImpl()->set_version_counter(values[i].count);
  }
}

PipelineWeights::Pass::Pass(PipelineWeights* weights, Of of, std::uint32_t micro_batch) : weights_(weights) {
  if (!weights_) return;
  if (weights_->in_place_) {
    if (of == Of::kForward || weights_->d_.empty()) weights_ = nullptr;
    if (weights_) weights_->use_corrected(true);
    return;
  }
  const PipelineVersion& version = weights_->versions_[micro_batch];
  version_ = of == Of::kForward ? version.forward : version.backward;
  if (version_ == weights_->newest_) return;
  weights_->newest_values_ = weights_->values_now();
  weights_->put(weights_->kept_.at(version_));
}

PipelineWeights::Pass::~Pass() {
  if (!weights_) return;
  if (weights_->in_place_) {
    weights_->use_corrected(false);
    return;
  }
  if (version_ != weights_->newest_) weights_->put(std::exchange(weights_->newest_values_, {}));
  if (--weights_->passes_left_.at(version_) == 0) weights_->let_go(version_);
}

void PipelineWeights::use_corrected(bool corrected) {
  const at::NoGradGuard no_grad;
  modify([&] {
    for (std::size_t i = 0; i < d_.size(); ++i) {
      if (corrected) {
        spare_[i].copy_(parameters_[i].detach());
        parameters_[i].sub_(d_[i], delay_);
      } else {
        parameters_[i].copy_(spare_[i]);
      }
    }
  });
}

void PipelineWeights::let_go(std::uint32_t version) {
  passes_left_.erase(version);
  if (auto kept = kept_.extract(version); !kept.empty()) free_.push_back(std::move(kept.mapped()));
}

// What forward passes have saved is to be the newest in backward passes, which autograd would refuse.
void PipelineWeights::modify(const std::function<void()>& work) {
  const Values before = values_now();
  std::vector<std::uint32_t> counts;
  for (const Value& value : before) counts.push_back(value.count.current_version());
  work();
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (!parameters_[i].is_alias_of(before[i].data))
      throw ConfigError(
          "reef::Pipeline: an optimizer that gives parameters other memory instead of "
          "updating them in place cannot make their newest version: take another one.");
    c10::VariableVersion count = before[i].count;
    count.set_version(counts[i]);
  }
}

void PipelineWeights::correct(double delay, double decay) {
  if (delay <= 0) return;
  delay_ = delay;
  follows_ = std::pow(decay, 1 / delay);
  for (const Tensor& parameter : parameters_) {
    d_.push_back(at::zeros_like(parameter.detach()));
    spare_.push_back(at::empty_like(parameter.detach()));
  }
}

void PipelineWeights::update(const std::function<void()>& step) {
  const at::NoGradGuard no_grad;
  if (in_place_) {
    for (std::size_t i = 0; i < spare_.size(); ++i) spare_[i].copy_(parameters_[i].detach());
    modify(step);
    for (std::size_t i = 0; i < d_.size(); ++i)
      d_[i].mul_(follows_).add_(parameters_[i].detach() - spare_[i], 1 - follows_);
    ++newest_;
    return;
  }
  if (passes_left_.contains(newest_)) {
    Values next;
    if (!free_.empty()) {
      next = std::move(free_.back());
      free_.pop_back();
    } else {
      for (const Tensor& parameter : parameters_)
        next.push_back({at::empty_strided(parameter.sizes(), parameter.strides(), parameter.options()), {}});
    }
    for (std::size_t i = 0; i < next.size(); ++i) {
      next[i].data.copy_(parameters_[i].detach());
      next[i].count = c10::VariableVersion(0);
    }
    kept_.emplace(newest_, values_now());
    put(next);
  }
  step();
  ++newest_;
}

void PipelineWeights::settle() {
  const at::NoGradGuard no_grad;
  const Values newest = values_now();
  put(first_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (newest_ == 0) continue;
    if (newest[i].data.is_alias_of(first_[i].data)) {
      first_[i].count.bump();
    } else {
      parameters_[i].copy_(newest[i].data);
    }
  }
  kept_.clear();
  free_.clear();
  passes_left_.clear();
}

}  // namespace reef
