#include "optim/restore.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "optim/operators.h"
#include "optim/step.h"
#include "reef/error.h"

namespace reef::optim {

using at::Tensor;
using kernels::OptimMaster;

namespace {

const Tensor* find(const NamedTensors& tensors, const std::string& name) {
  const auto found =
      std::find_if(tensors.begin(), tensors.end(), [&](const auto& one) { return one.first == name; });
  return found == tensors.end() || !found->second.defined() ? nullptr : &found->second;
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

std::string described(const Tensor& tensor) {
  std::ostringstream text;
  text << c10::toString(tensor.scalar_type()) << " of shape " << tensor.sizes();
  return text.str();
}

bool alike(const Tensor& left, const Tensor& right) {
  return left.layout() == c10::kStrided && left.scalar_type() == right.scalar_type() &&
         left.sizes() == right.sizes();
}

/// One state that is loaded: of whom its refusals speak, what there is, and what must be.
class Restoring {
 public:
  Restoring(const std::string& who, const StateLayout& layout, const Tensor& parameter,
            const NamedTensors& saved)
      : who_(who), layout_(layout), parameter_(parameter), saved_(saved) {}

  NamedTensors run() {
    check_names();
    made_.emplace_back("step", step());
    for (const OptimStateName& state : optim_states_at_most(layout_.rule)) {
      if (find(saved_, state.name) != nullptr) restore(state);
    }
    restore_master();
    return std::move(made_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const { throw ConfigError(who_ + ": " + what); }

  // What is there that no state of this rule is called, and what is not there that a step needs.
  void check_names() const {
    const std::vector<OptimStateName> possible = optim_states_at_most(layout_.rule);
    std::vector<std::string> unknown;
    for (const auto& [name, tensor] : saved_) {
      if (!tensor.defined() || name == "step" || name == "master") continue;
      const bool known = std::any_of(possible.begin(), possible.end(), [&](const OptimStateName& state) {
        return name == state.name || name == std::string(state.name) + "_scale";
      });
      if (!known) unknown.push_back(name);
    }
    std::vector<std::string> missing;
    if (find(saved_, "step") == nullptr && layout_.rule != "sgd") missing.emplace_back("step");
    for (const OptimStateName& state : optim_states(layout_.rule, layout_.numbers)) {
      if (!may_begin_later(layout_.rule) && find(saved_, state.name) == nullptr)
        missing.emplace_back(state.name);
    }
    if (unknown.empty() && missing.empty()) return;
    refuse(
        "the state that is loaded " + (missing.empty() ? "" : "lacks " + listed(missing)) +
        (missing.empty() || unknown.empty() ? "" : ", and ") +
        (unknown.empty() ? "" : "has " + listed(unknown) + ", which " + layout_.rule + " does not keep") +
        "; load it into an optimizer of the class and the options that saved it, or begin without a state");
  }

  // torch's SGD counts none; with a momentum, the first is over.
  Tensor step() const {
    const Tensor* saved = find(saved_, "step");
    if (saved == nullptr) return at::full({}, 1, at::kFloat);
    if (saved->numel() != 1 || saved->is_complex() || saved->scalar_type() == at::kBool)
      refuse("step is " + described(*saved) + "; it is one number, of the steps that were taken");
    const auto steps = saved->item<double>();
    if (!(steps >= 0) || !std::isfinite(steps) || steps != std::floor(steps))
      refuse("step is " + std::to_string(steps) + "; it is the number of steps that were taken");
    return at::full({}, steps, at::kFloat);
  }

  void restore(const OptimStateName& state) {
    const Tensor& value = *find(saved_, state.name);
    const std::string scale_name = std::string(state.name) + "_scale";
    const Tensor* const scale = find(saved_, scale_name);
    auto [codes, scales] = ops::state(parameter_, layout_.format, state.is_signed);
    if (alike(value, codes)) {
      if (scales.numel() > 0 && scale == nullptr) refuse("the state that is loaded lacks " + scale_name);
      if (scale != nullptr && !alike(*scale, scales)) refuse(misfit(scale_name, *scale, scales));
      codes.copy_(value);
      if (scales.numel() > 0) scales.copy_(*scale);
    } else {
      const bool plain = value.scalar_type() == at::kFloat || value.scalar_type() == at::kBFloat16 ||
                         value.scalar_type() == at::kHalf;
      if (!plain || value.layout() != c10::kStrided || value.sizes() != parameter_.sizes())
        refuse(misfit(state.name, value, codes));
      if (scale != nullptr) refuse(scale_name + " is loaded for " + state.name + ", which has no codes");
      const Tensor values = at::empty_like(parameter_, at::kFloat).copy_(value);
      std::tie(codes, scales) = ops::encode(parameter_, values, layout_.format, state.is_signed);
    }
    made_.emplace_back(state.name, codes);
    if (scales.numel() > 0) made_.emplace_back(scale_name, scales);
  }

  std::string misfit(const std::string& name, const Tensor& value, const Tensor& expected) const {
    std::ostringstream text;
    text << name << " is " << described(value) << ", and a parameter of shape " << parameter_.sizes()
         << " has it in " << layout_.format << " as " << described(expected);
    if (expected.scalar_type() != at::kFloat) text << ", or plain, as Float of its own shape";
    text << "; build the model and the optimizer's groups as they were, or begin without a state";
    return text.str();
  }

  void restore_master() {
    const Tensor* const saved = find(saved_, "master");
    Tensor master = begun_master(parameter_, layout_.master);
    if (saved == nullptr) {
      if (!master.defined()) return;
      if (layout_.says_master)
        refuse("the state that is loaded lacks master, which its group's master weights (" + layout_.master +
               ") are kept in; set the group's master to none in what is loaded, and they are gone");
    } else {
      if (!master.defined()) {
        refuse("the state that is loaded has master weights (" + described(*saved) +
               "), and a parameter of dtype " + c10::toString(parameter_.scalar_type()) +
               " with master=" + layout_.master +
               " keeps none; load it into the model that saved it, or take master out of what is loaded");
      }
      if (!alike(*saved, master)) {
        refuse("master is " + described(*saved) + ", and master=" + layout_.master + " keeps " +
               described(master) + "; build the model as it was");
      }
      master.copy_(*saved);
    }
    made_.emplace_back("master", master);
  }

  const std::string& who_;
  const StateLayout& layout_;
  const Tensor& parameter_;
  const NamedTensors& saved_;
  NamedTensors made_;
};

}  // namespace

Tensor begun_master(const Tensor& parameter, std::string_view master) {
  const OptimMaster kind = optim_master(master);
  if (parameter.scalar_type() == at::kFloat) return {};
  if (kind == OptimMaster::kFloat32) return at::empty_like(parameter, at::kFloat).copy_(parameter);
  if (kind == OptimMaster::kSplit) return at::full_like(parameter, 128, at::kByte);
  return {};
}

NamedTensors restored(const std::string& who, const StateLayout& layout, const Tensor& parameter,
                      const NamedTensors& saved) {
  const at::NoGradGuard no_grad;
  return Restoring(who, layout, parameter.detach(), saved).run();
}

}  // namespace reef::optim

namespace {

std::tuple<std::vector<std::string>, std::vector<at::Tensor>> restored(
    const std::string& who, const std::string& rule, at::ArrayRef<double> numbers, const std::string& state,
    const std::string& master, bool says_master, const at::Tensor& parameter, std::vector<std::string> names,
    at::TensorList values) {
  reef::optim::NamedTensors saved;
  for (std::size_t i = 0; i < names.size(); ++i) saved.emplace_back(names[i], values[i]);
  std::tuple<std::vector<std::string>, std::vector<at::Tensor>> found;
  for (auto& [name, tensor] :
       reef::optim::restored(who, {rule, numbers.vec(), state, master, says_master}, parameter, saved)) {
    std::get<0>(found).push_back(name);
    std::get<1>(found).push_back(tensor);
  }
  return found;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def(
      "optim_restored(str who, str rule, float[] numbers, str state, str master, bool says_master, "
      "Tensor parameter, str[] names, Tensor[] values) -> (str[], Tensor[])",
      &restored);
}
