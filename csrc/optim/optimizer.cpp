#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include <optional>
#include <utility>

#include "optim/operators.h"
#include "optim/options.h"
#include "reef/error.h"
#include "reef/gradient_release.h"
#include "reef/ledger.h"
#include "reef/optim.h"

namespace reef::optim {

using at::Tensor;
using torch::optim::OptimizerParamGroup;

namespace {

std::vector<OptimizerParamGroup> without_options(const std::vector<OptimizerParamGroup>& groups) {
  std::vector<OptimizerParamGroup> bare;
  for (const OptimizerParamGroup& group : groups) bare.emplace_back(group.params());
  return bare;
}

// In the parameter's layout.
Tensor gradient_of(std::size_t group, std::size_t index, const Tensor& parameter) {
  if (!parameter.is_cpu() && !parameter.is_cuda()) {
    throw ConfigError(described(group, index, parameter) + " is on " + parameter.device().str() +
                      "; parameters on the CPU and on CUDA devices are stepped");
  }
  const Tensor& gradient = parameter.grad();
  if (gradient.layout() != c10::kStrided) {
    throw ConfigError(described(group, index, parameter) +
                      " has a sparse gradient; make its layer dense, or give it to an optimizer of torch's");
  }
  if (gradient.strides() == parameter.strides()) return gradient;
  return at::empty_like(parameter, gradient.options()).copy_(gradient);
}

// A group's own options, and the defaults' where it has set none.
std::unique_ptr<OptionsBase> merged(const OptimizerParamGroup& group,
                                    const torch::optim::OptimizerOptions& defaults) {
  const auto& own = static_cast<const OptionsBase&>(defaults);
  if (!group.has_options()) return cloned(own);
  std::unique_ptr<OptionsBase> options = cloned(options_of(group));
  options->inherit(own);
  return options;
}

}  // namespace

Optimizer::Optimizer(const std::vector<OptimizerParamGroup>& groups, std::unique_ptr<OptionsBase> defaults,
                     const char* rule, bool decoupled)
    // LibTorch 2.13 to 2.15 drop a group's options unless they are of its own classes: they are set below.
    : torch::optim::Optimizer(without_options(groups), std::move(defaults)),
      rule_(rule),
      decoupled_(decoupled) {
  check(static_cast<const OptionsBase&>(*defaults_));
  for (std::size_t i = 0; i < groups.size(); ++i) {
    std::unique_ptr<OptionsBase> options = merged(groups[i], *defaults_);
    check(*options);
    param_groups_[i].set_options(std::move(options));
  }
}

void Optimizer::add_param_group(const OptimizerParamGroup& group) {
  std::unique_ptr<OptionsBase> options = merged(group, *defaults_);
  check(*options);
  torch::optim::Optimizer::add_param_group(OptimizerParamGroup(group.params()));
  param_groups_.back().set_options(std::move(options));
}

void Optimizer::check(const OptionsBase& options) const {
  for (const char* key :
       {"lr", "weight_decay", "eps", "momentum", "alpha", "lr_decay", "initial_accumulator_value"}) {
    if (options.has(key) && !(options.get(key).toDouble() >= 0)) {
      throw ConfigError(rule_ + ": " + key + " is " + std::to_string(options.get(key).toDouble()) +
                        "; give 0 or more");
    }
  }
  if (options.has("betas")) {
    const auto [beta1, beta2] = options.get("betas").to<Betas>();
    for (const double beta : {beta1, beta2}) {
      if (!(beta >= 0 && beta < 1))
        throw ConfigError(rule_ + ": a beta is " + std::to_string(beta) +
                          "; give a number from 0 to below 1");
    }
  }
  if (options.has("nesterov") && options.get("nesterov").toBool() &&
      (options.get("momentum").toDouble() <= 0 || options.get("dampening").toDouble() != 0)) {
    throw ConfigError(rule_ + ": nesterov needs a momentum and no dampening");
  }
}

std::vector<double> Optimizer::numbers(const OptionsBase& options) const {
  const auto number = [&](const char* key) {
    if (!options.has(key)) return 0.0;
    const c10::IValue& value = options.get(key);
    return value.isBool() ? static_cast<double>(value.toBool()) : value.toDouble();
  };
  OptimHyper hyper;
  hyper.lr = number("lr");
  hyper.beta1 = number("momentum");
  hyper.beta2 = number("alpha");
  if (options.has("betas")) std::tie(hyper.beta1, hyper.beta2) = options.get("betas").to<Betas>();
  hyper.eps = number("eps");
  hyper.weight_decay = number("weight_decay");
  hyper.dampening = number("dampening");
  hyper.lr_decay = number("lr_decay");
  hyper.trust_coefficient = number("trust_coefficient");
  hyper.decoupled = decoupled_ ? 1 : 0;
  hyper.amsgrad = number("amsgrad");
  hyper.nesterov = number("nesterov");
  hyper.centered = number("centered");
  hyper.maximize = number("maximize");
  return hyper.numbers();
}

ParameterState& Optimizer::begin(const OptionsBase& options, const Tensor& parameter) {
  const CategoryScope category(Category::kOptimizerState);  // with gradient release, it is in backward
  auto fresh = std::make_unique<ParameterState>();
  ParameterState& state = *fresh;
  state.step = at::zeros({}, at::kFloat);
  const std::string format = format_name(options, parameter);
  for (const OptimStateName& kept : optim_states(rule_, numbers(options))) {
    auto [codes, scales] = ops::state(parameter, format, kept.is_signed);
    if (options.has("initial_accumulator_value") &&
        options.get("initial_accumulator_value").toDouble() != 0) {
      std::tie(codes, scales) = ops::encode(
          parameter,
          at::full_like(parameter, options.get("initial_accumulator_value").toDouble(), at::kFloat), format,
          kept.is_signed);
    }
    state[kept.name] = codes;
    if (scales.numel() > 0) state[scale_name(kept)] = scales;
  }
  const auto master = static_cast<MasterWeights>(options.get("master").toInt());
  if (parameter.scalar_type() != at::kFloat && master == MasterWeights::kFloat32)
    state["master"] = at::empty_like(parameter, at::kFloat).copy_(parameter);
  if (parameter.scalar_type() != at::kFloat && master == MasterWeights::kSplit)
    state["master"] = at::full_like(parameter, 128, at::kByte);
  state_[parameter.unsafeGetTensorImpl()] = std::move(fresh);
  return state;
}

Optimizer::Stepped Optimizer::step_these(std::size_t group, std::vector<std::size_t> indices) {
  const at::NoGradGuard no_grad;
  const OptionsBase& options = options_of(param_groups_[group]);
  const std::vector<Tensor>& all = param_groups_[group].params();
  const std::vector<double> given = numbers(options);
  const std::vector<OptimStateName> names = optim_states(rule_, given);
  const auto master = static_cast<kernels::OptimMaster>(options.get("master").toInt());
  const bool has_masters = kernels::optim_master_bytes(master) > 0;
  std::vector<Tensor> parameters, gradients, states, masters, steps;
  for (const std::size_t i : indices) {
    gradients.push_back(gradient_of(group, i, all[i]));
    const auto kept = state_.find(all[i].unsafeGetTensorImpl());
    ParameterState& state =
        kept == state_.end() ? begin(options, all[i]) : static_cast<ParameterState&>(*kept->second);
    parameters.push_back(all[i]);
    steps.push_back(state.step);
    for (const OptimStateName& named : names) {
      states.push_back(or_empty(state.find(named.name)));
      states.push_back(or_empty(state.find(scale_name(named))));
    }
    if (has_masters) masters.push_back(or_empty(state.find("master")));
  }
  const Tensor nonfinite =
      ops::step(rule_, format_name(options), std::string(name(master)), parameters, gradients, states,
                masters, steps, given, std::nullopt, std::nullopt, std::nullopt);
  return {group, std::move(indices), nonfinite};
}

void Optimizer::report(const std::vector<Stepped>& all) const {
  std::string found;
  for (const Stepped& stepped : all) {
    const Tensor counts = stepped.nonfinite.cpu();
    for (std::size_t k = 0; k < stepped.indices.size(); ++k) {
      const std::int64_t count = counts.const_data_ptr<std::int64_t>()[k];
      if (count == 0) continue;
      const std::size_t index = stepped.indices[k];
      found += (found.empty() ? "" : "; ") +
               described(stepped.group, index, param_groups_[stepped.group].params()[index]) + " (" +
               std::to_string(count) + " elements)";
    }
  }
  if (found.empty()) return;
  throw NonFiniteGradient(
      rule_ + ": gradients are not finite: " + found +
      "; blocks of 256 elements that hold such a one, and whole matrices of int4_rank1, have "
      "been left as they were");
}

Tensor Optimizer::step(LossClosure closure) {
  Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  std::vector<Stepped> stepped;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    const std::vector<Tensor>& all = param_groups_[group].params();
    std::vector<std::size_t> indices;
    std::optional<c10::Device> device;
    std::int64_t bytes = 0;
    std::int64_t most = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!all[i].grad().defined() || all[i].numel() == 0) continue;
      const auto size = static_cast<std::int64_t>(all[i].nbytes());
      const bool moves = device != all[i].device();
      if (!indices.empty() && (moves || bytes + size > most)) {
        stepped.push_back(step_these(group, std::exchange(indices, {})));
        bytes = 0;
      }
      if (moves) {
        device = all[i].device();
        most = ops::slice_bytes(*device);
      }
      indices.push_back(i);
      bytes += size;
    }
    if (!indices.empty()) stepped.push_back(step_these(group, std::move(indices)));
  }
  if (release_ != nullptr) {
    std::vector<Stepped> in_backward = release_->end_step();
    stepped.insert(stepped.begin(), in_backward.begin(), in_backward.end());
  }
  report(stepped);
  return loss;
}

}  // namespace reef::optim
