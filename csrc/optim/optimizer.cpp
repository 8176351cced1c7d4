#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "kernels/exact_sum.h"
#include "optim/norm_sums.h"
#include "optim/operators.h"
#include "optim/options.h"
#include "optim/restore.h"
#include "reef/error.h"
#include "reef/gradient_release.h"
#include "reef/ledger.h"
#include "reef/optim.h"
#include "reef/part.h"

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
Tensor gradient_of(const Tensor& parameter) {
  const Tensor& gradient = parameter.grad();
  if (gradient.strides() == parameter.strides()) return gradient;
  return at::empty_like(parameter, gradient.options()).copy_(gradient);
}

// A group's own options, and the defaults' where it has set none.
std::unique_ptr<OptionsBase> merged(const OptimizerParamGroup& group,
                                    const torch::optim::OptimizerOptions& defaults) {
  const auto& own = static_cast<const OptionsBase&>(defaults);
  if (!group.has_options()) return cloned(own);
  check_class(group, defaults);
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
  check_options(rule_, static_cast<const OptionsBase&>(*defaults_));
  for (std::size_t i = 0; i < groups.size(); ++i) {
    std::unique_ptr<OptionsBase> options = merged(groups[i], *defaults_);
    check_options(rule_, *options);
    check_nesterov(rule_, *options);
    param_groups_[i].set_options(std::move(options));
    check_parameters(i);
    check_group(i);
  }
}

void Optimizer::add_param_group(const OptimizerParamGroup& group) {
  std::unique_ptr<OptionsBase> options = merged(group, *defaults_);
  check_options(rule_, *options);
  check_nesterov(rule_, *options);
  torch::optim::Optimizer::add_param_group(OptimizerParamGroup(group.params()));
  try {
    param_groups_.back().set_options(std::move(options));
    check_parameters(param_groups_.size() - 1);
    check_group(param_groups_.size() - 1);
  } catch (...) {
    param_groups_.pop_back();
    throw;
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

void Optimizer::begin(const OptionsBase& options, const Tensor& parameter, const std::string& name,
                      bool is_signed, ParameterState& state) const {
  const CategoryScope category(Category::kOptimizerState);  // with gradient release, it is in backward
  const std::string format = format_name(options, parameter);
  auto [codes, scales] = ops::state(parameter, format, is_signed);
  const double first =
      options.has("initial_accumulator_value") ? options.get("initial_accumulator_value").toDouble() : 0;
  if (first != 0) {
    std::tie(codes, scales) =
        ops::encode(parameter, at::full_like(parameter, first, at::kFloat), format, is_signed);
  }
  state[name] = codes;
  if (scales.numel() > 0) state[name + "_scale"] = scales;
}

std::unique_ptr<ParameterState> Optimizer::begun(const OptionsBase& options, const Tensor& parameter) const {
  const CategoryScope category(Category::kOptimizerState);
  auto state = std::make_unique<ParameterState>();
  state->step = at::zeros({}, at::kFloat);
  state->layout = layout_of(options, parameter);
  for (const OptimStateName& kept : optim_states(rule_, numbers(options)))
    begin(options, parameter, kept.name, kept.is_signed, *state);
  if (const Tensor master = begun_master(parameter, master_name(options)); master.defined())
    (*state)["master"] = master;
  return state;
}

struct Optimizer::Operands {
  std::vector<Tensor> parameters, gradients, states, masters, steps;
  std::vector<std::int64_t> begins;
  /// States that begin: they are kept when the step has been taken.
  std::vector<std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>> fresh;
};

Optimizer::Operands Optimizer::operands_of(std::size_t group, const std::vector<std::size_t>& indices) const {
  const OptionsBase& options = options_of(param_groups_[group]);
  const std::vector<Tensor>& all = param_groups_[group].params();
  const std::vector<OptimStateName> names = optim_states(rule_, numbers(options));
  const bool has_masters =
      kernels::optim_master_bytes(kernels::OptimMaster(options.get("master").toInt())) > 0;
  Operands found;
  for (const std::size_t i : indices) {
    void* const key = all[i].unsafeGetTensorImpl();
    found.gradients.push_back(gradient_of(all[i]));
    const auto kept = state_.find(key);
    const ParameterState* state =
        kept == state_.end() ? nullptr : static_cast<const ParameterState*>(kept->second.get());
    const bool lacks = state != nullptr && std::any_of(names.begin(), names.end(), [&](const auto& named) {
                         return !state->find(named.name).defined();
                       });
    if (state == nullptr || lacks) {
      std::unique_ptr<ParameterState> made =
          lacks ? std::make_unique<ParameterState>(*state) : begun(options, all[i]);
      for (const OptimStateName& named : names) {
        if (!made->find(named.name).defined()) begin(options, all[i], named.name, named.is_signed, *made);
      }
      if (lacks) found.begins.push_back(static_cast<std::int64_t>(found.parameters.size()));
      state = made.get();
      found.fresh.emplace_back(key, std::move(made));
    }
    found.parameters.push_back(all[i]);
    found.steps.push_back(state->step);
    for (const OptimStateName& named : names) {
      found.states.push_back(or_empty(state->find(named.name)));
      found.states.push_back(or_empty(state->find(scale_name(named))));
    }
    if (has_masters) found.masters.push_back(or_empty(state->find("master")));
  }
  return found;
}

Optimizer::Stepped Optimizer::step_these(std::size_t group, std::vector<std::size_t> indices,
                                         const Tensor& squares) {
  const at::NoGradGuard no_grad;
  const OptionsBase& options = options_of(param_groups_[group]);
  Operands of = operands_of(group, indices);
  const Tensor nonfinite =
      ops::step(rule_, format_name(options), master_name(options), of.parameters, of.gradients, of.states,
                of.masters, of.steps, numbers(options), std::nullopt, std::nullopt, std::nullopt, of.begins,
                squares.defined() ? std::optional(squares) : std::nullopt);
  for (auto& [key, state] : of.fresh) state_[key] = std::move(state);
  return {group, std::move(indices), nonfinite};
}

void Optimizer::norms_over(const ProcessGroupPtr& group) {
  if (!needs_norms(optim_rule(rule_, OptimHyper())))
    throw ConfigError(rule_ + ": norms_over() is for rules of norms, lamb and lars; leave it out");
  norms_ = std::make_shared<NormSums>(group);
}

// A rank has a row for every parameter, the same on all ranks; of those that are whole, a rank's own.
std::vector<Tensor> Optimizer::squares_over_ranks(const Slices& slices) const {
  std::vector<Tensor> squares(slices.size());
  bool has_parts = false;
  std::vector<std::int64_t> first_rows;
  std::int64_t rows = 0;
  for (const OptimizerParamGroup& group : param_groups_) {
    first_rows.push_back(rows);
    rows += static_cast<std::int64_t>(group.params().size());
    for (const Tensor& parameter : group.params()) has_parts = has_parts || part_of(parameter).has_value();
  }
  if (norms_ == nullptr || !has_parts) return squares;  // the step refuses parts without them
  const at::NoGradGuard no_grad;
  Tensor all;
  const auto for_parts = [&](const auto& visit) {
    for (std::size_t s = 0; s < slices.size(); ++s) {
      const auto& [group, indices] = slices[s];
      for (std::size_t k = 0; k < indices.size(); ++k) {
        const std::optional<Part> part = part_of(param_groups_[group].params()[indices[k]]);
        if (!part) continue;
        visit(squares[s][static_cast<std::int64_t>(k)],
              all[first_rows[group] + static_cast<std::int64_t>(indices[k])], *part);
      }
    }
  };
  for (std::size_t s = 0; s < slices.size(); ++s) {
    const auto& [group, indices] = slices[s];
    const OptionsBase& options = options_of(param_groups_[group]);
    const Operands of = operands_of(group, indices);
    squares[s] = ops::squares(rule_, format_name(options), master_name(options), of.parameters, of.gradients,
                              of.states, of.masters, of.steps, numbers(options));
  }
  all = at::zeros({rows, 2, kernels::ExactSum::kDigits + 1}, at::kLong);
  for_parts([](const Tensor& own, const Tensor& row, const Part& part) {
    if (part.copy == 0) row.copy_(own);
  });
  all = norms_->add_up(all);
  for_parts([](const Tensor& own, const Tensor& row, const Part&) { own.copy_(row); });
  return squares;
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
  Slices slices;
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
        slices.emplace_back(group, std::exchange(indices, {}));
        bytes = 0;
      }
      if (moves) {
        device = all[i].device();
        most = ops::slice_bytes(*device);
      }
      indices.push_back(i);
      bytes += size;
    }
    if (!indices.empty()) slices.emplace_back(group, std::move(indices));
  }
  for (std::size_t group = 0; group < param_groups_.size(); ++group) check_group(group);
  for (const auto& [group, indices] : slices) check_these(group, indices);
  std::vector<Stepped> stepped;
  const std::vector<Tensor> squares = squares_over_ranks(slices);
  for (std::size_t s = 0; s < slices.size(); ++s)
    stepped.push_back(step_these(slices[s].first, std::move(slices[s].second), squares[s]));
  if (release_ != nullptr) {
    std::vector<Stepped> in_backward = release_->end_step();
    stepped.insert(stepped.begin(), in_backward.begin(), in_backward.end());
  }
  report(stepped);
  return loss;
}

}  // namespace reef::optim
