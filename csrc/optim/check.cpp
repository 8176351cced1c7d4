#include <sstream>
#include <typeinfo>
#include <unordered_set>
#include <utility>

#include "optim/one_bit_adam.h"
#include "optim/operators.h"
#include "optim/options.h"
#include "reef/error.h"
#include "reef/optim.h"

// What a step asks of groups, parameters and gradients, and of states that were begun before.
namespace reef::optim {

using at::Tensor;
using torch::optim::OptimizerParamGroup;

namespace {

bool is_stepped(c10::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

void check_gradient(const std::string& who, const Tensor& parameter) {
  const Tensor& gradient = parameter.grad();
  if (gradient.layout() != c10::kStrided)
    throw ConfigError(who +
                      " has a sparse gradient; make its layer dense, or give it to an optimizer of torch's");
  if (!parameter.is_non_overlapping_and_dense())
    throw ConfigError(who + " has gaps in memory, or shares it with itself; make it dense");
  std::ostringstream text;
  if (gradient.sizes() != parameter.sizes()) text << "of shape " << gradient.sizes();
  if (!is_stepped(gradient.scalar_type())) text << "of dtype " << c10::toString(gradient.scalar_type());
  if (gradient.device() != parameter.device()) text << "on " << gradient.device();
  if (text.str().empty()) return;
  throw ConfigError(who + " has a gradient " + text.str() +
                    "; clear gradients (zero_grad()) when parameters are changed, and run backward again");
}

// A dimension of one element lies anywhere.
std::vector<std::int64_t> strides_that_matter(const Tensor& tensor) {
  std::vector<std::int64_t> strides = tensor.strides().vec();
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) <= 1) strides[static_cast<std::size_t>(i)] = 1;
  }
  return strides;
}

std::string text_of(const ParameterState::Layout& layout) {
  std::ostringstream text;
  text << "shape " << at::IntArrayRef(layout.sizes) << ", strides " << at::IntArrayRef(layout.strides)
       << ", dtype " << c10::toString(layout.dtype) << ", on " << layout.device << ", states in "
       << layout.format << ", master weights " << name(static_cast<kernels::OptimMaster>(layout.master));
  return text.str();
}

}  // namespace

void check_class(const OptimizerParamGroup& group, const torch::optim::OptimizerOptions& defaults) {
  const torch::optim::OptimizerOptions& own = group.options();
  if (typeid(own) != typeid(defaults)) {
    throw ConfigError(
        "a parameter group has options of another class than the optimizer; give it reef::optim's options of "
        "the optimizer's own rule");
  }
}

ParameterState::Layout Optimizer::layout_of(const OptionsBase& options, const Tensor& parameter) const {
  return {parameter.sizes().vec(),         strides_that_matter(parameter),
          parameter.scalar_type(),         parameter.device(),
          format_name(options, parameter), static_cast<MasterWeights>(options.get("master").toInt())};
}

// Each is stepped once, and in a dtype that the kernels have.
void Optimizer::check_parameters(std::size_t group) const {
  std::unordered_set<const void*> before;
  for (std::size_t g = 0; g <= group; ++g) {
    const std::vector<Tensor>& all = param_groups_[g].params();
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!before.insert(all[i].unsafeGetTensorImpl()).second) {
        throw ConfigError(rule_ + ": " + described(g, i, all[i]) +
                          " is in the optimizer already; give each parameter once");
      }
      if (g == group && !is_stepped(all[i].scalar_type())) {
        throw ConfigError(rule_ + ": " + described(g, i, all[i]) + " is of dtype " +
                          c10::toString(all[i].scalar_type()) +
                          "; float32, bfloat16 and float16 are stepped");
      }
    }
  }
}

void Optimizer::check_group(std::size_t group) const {
  check_class(param_groups_[group], *defaults_);
  const OptionsBase& options = options_of(param_groups_[group]);
  check_options(rule_, options);
  check_exchange(rule_, format_name(options), OptimHyper::of(numbers(options)),
                 param_groups_[group].params());
}

// With check_group(), all that can be known before a step: one that is refused has changed nothing.
void Optimizer::check_these(std::size_t group, const std::vector<std::size_t>& indices) const {
  const OptionsBase& options = options_of(param_groups_[group]);
  const std::vector<OptimStateName> names = optim_states(rule_, numbers(options));
  for (const std::size_t i : indices) {
    const Tensor& parameter = param_groups_[group].params()[i];
    const std::string who = rule_ + ": " + described(group, i, parameter);
    if (!parameter.is_cpu() && !parameter.is_cuda()) {
      throw ConfigError(who + " is on " + parameter.device().str() +
                        "; parameters on the CPU and on CUDA devices are stepped");
    }
    check_gradient(who, parameter);
    const auto found = state_.find(parameter.unsafeGetTensorImpl());
    if (found == state_.end()) {
      if (!is_stepped(parameter.scalar_type())) check_parameters(group);
      continue;
    }
    const auto& state = static_cast<const ParameterState&>(*found->second);
    const ParameterState::Layout now = layout_of(options, parameter);
    if (state.layout && *state.layout != now) {
      throw ConfigError(who + " has a state that was begun for " + text_of(*state.layout) + ", and is now " +
                        text_of(now) + "; build another optimizer for what was changed, or change it back");
    }
    for (const OptimStateName& kept : names) {
      if (state.find(kept.name).defined() || may_begin_later(rule_)) continue;
      throw ConfigError(who + " has no state " + kept.name +
                        ", which the options that were switched on since its first step need; switch them on "
                        "when the optimizer is made, or begin without a state");
    }
  }
  if (!is_one_bit_adam(rule_) || indices.empty()) return;
  std::vector<Tensor> parameters, gradients;
  for (const std::size_t i : indices) {
    parameters.push_back(param_groups_[group].params()[i]);
    gradients.push_back(parameters.back().grad());
  }
  ops::check_given(/*has_states=*/!state_.empty(), parameters, gradients);
}

}  // namespace reef::optim
