#include "reef/gradient_release.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "optim/options.h"
#include "reef/error.h"

namespace reef::optim {

using at::Tensor;
using torch::autograd::PostAccumulateGradHook;

struct GradientRelease::Watched {
  GradientRelease& release;
  std::size_t group;
  std::size_t index;
  int passes = 0;  ///< of backward, since the last step
};

/// In the one place that a parameter has for such hooks: what was there goes first. Others may put theirs
/// around it or in its place, so neither may rely on the other being there.
class GradientRelease::Hook final : public PostAccumulateGradHook {
 public:
  Hook(const std::shared_ptr<Watched>& watched, std::unique_ptr<PostAccumulateGradHook> before)
      : watched_(watched), before_(std::move(before)) {}

  void operator()(const Tensor& parameter) override {
    if (before_) (*before_)(parameter);
    if (const auto watched = watched_.lock()) watched->release.ready(*watched);
  }
  static void remove(std::unique_ptr<PostAccumulateGradHook>& place,
                     const std::shared_ptr<Watched>& watched) {
    auto* const hook = dynamic_cast<Hook*>(place.get());
    if (hook == nullptr || hook->watched_.lock() != watched) return;
    auto before = std::move(hook->before_);
    place = std::move(before);
  }

 private:
  std::weak_ptr<Watched> watched_;
  std::unique_ptr<PostAccumulateGradHook> before_;
};

GradientRelease::GradientRelease(Optimizer& optimizer, int accumulate)
    : optimizer_(optimizer), accumulate_(accumulate) {
  if (accumulate < 1) {
    throw ConfigError("GradientRelease: accumulate is " + std::to_string(accumulate) +
                      "; give the number of backward passes in a step, at least 1");
  }
  if (optimizer.release_ != nullptr)
    throw ConfigError("GradientRelease: the optimizer's gradients are being released already");
  const auto& groups = optimizer.param_groups();
  for (std::size_t group = 0; group < groups.size(); ++group) {
    const std::vector<Tensor>& parameters = groups[group].params();
    for (std::size_t index = 0; index < parameters.size(); ++index) {
      if (!parameters[index].requires_grad()) continue;
      watched_.push_back(std::make_shared<Watched>(Watched{*this, group, index}));
      auto before = std::move(torch::autograd::impl::post_acc_grad_hooks(parameters[index]));
      torch::autograd::impl::set_post_acc_grad_hooks(
          parameters[index], std::make_unique<Hook>(watched_.back(), std::move(before)));
    }
  }
  optimizer.release_ = this;  // the last: nothing after it can throw
}

GradientRelease::~GradientRelease() {
  for (const auto& watched : watched_) {
    const Tensor& parameter = optimizer_.param_groups()[watched->group].params()[watched->index];
    Hook::remove(torch::autograd::impl::post_acc_grad_hooks(parameter), watched);
  }
  optimizer_.release_ = nullptr;
}

void GradientRelease::ready(Watched& watched) {
  const std::lock_guard lock(mutex_);
  if (watched.passes == accumulate_) {
    const Tensor& parameter = optimizer_.param_groups()[watched.group].params()[watched.index];
    throw ConfigError("GradientRelease: " + described(watched.group, watched.index, parameter) +
                      " has been stepped after " + std::to_string(accumulate_) +
                      " backward passes, and here is another; give the number of passes in a step as "
                      "accumulate, and call step() after them");
  }
  if (watched.passes + 1 == accumulate_) {
    optimizer_.check_group(watched.group);
    optimizer_.check_these(watched.group, {watched.index});
    stepped_.push_back(optimizer_.step_these(watched.group, {watched.index}));
    optimizer_.param_groups()[watched.group].params()[watched.index].mutable_grad().reset();
  }
  ++watched.passes;  // the last: a pass that was refused is none
}

std::vector<Optimizer::Stepped> GradientRelease::end_step() {
  const std::lock_guard lock(mutex_);
  optimizer_.zero_grad();
  for (const auto& watched : watched_) watched->passes = 0;
  return std::exchange(stepped_, {});
}

}  // namespace reef::optim
