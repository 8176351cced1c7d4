#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <set>

#include "optim/operators.h"
#include "optim/options.h"
#include "optim/restore.h"
#include "reef/error.h"
#include "reef/ledger.h"
#include "reef/optim.h"

// The layout of files is torch::optim's (torch/optim/serialize.h), so that either reads the other's.
namespace reef::optim {

using at::Tensor;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

namespace {

std::string key_of(const Tensor& parameter) {
  return std::to_string(reinterpret_cast<std::size_t>(parameter.unsafeGetTensorImpl()));
}

std::int64_t read_size(InputArchive& archive, const std::string& key) {
  Tensor size;
  if (!archive.try_read(key, size))
    throw ConfigError("there is no " + key + " in the archive: it is not an optimizer's");
  return size.item<std::int64_t>();
}

// LibTorch writes undefined tensors, and steps as numbers.
NamedTensors read_tensors(const std::string& who, InputArchive& archive) {
  NamedTensors read;
  for (const std::string& key : archive.keys()) {
    c10::IValue value;
    archive.read(key, value);
    if (value.isNone()) continue;
    if (!value.isTensor() && !value.isInt() && !value.isDouble())
      throw ConfigError(who + ": " + key +
                        " is no tensor in the state that is loaded; it is of another optimizer");
    read.emplace_back(key,
                      value.isTensor() ? value.toTensor() : at::scalar_tensor(value.toScalar(), at::kDouble));
  }
  return read;
}

// Options by which rules are told from each other; others came to them later, or are Reef's own.
constexpr const char* kOfRules[] = {"lr",
                                    "weight_decay",
                                    "betas",
                                    "eps",
                                    "amsgrad",
                                    "momentum",
                                    "dampening",
                                    "alpha",
                                    "nesterov",
                                    "centered",
                                    "lr_decay",
                                    "trust_coefficient",
                                    "initial_accumulator_value"};

void check_same_rule(const std::string& rule, const OptionsBase& own, const std::vector<std::string>& given) {
  for (const char* const key : kOfRules) {
    const bool there = std::find(given.begin(), given.end(), key) != given.end();
    if (there == own.has(key)) continue;
    throw ConfigError(rule + ": the groups that are loaded have " + (there ? "" : "no ") + key + ", and " +
                      rule + (there ? " has no such option" : " needs it") +
                      "; they are of another optimizer: load them into the class that saved them");
  }
}

}  // namespace

void Optimizer::save(OutputArchive& archive) const { write(archive, false); }
void Optimizer::save_for_torch(OutputArchive& archive) const { write(archive, true); }

void Optimizer::write(OutputArchive& archive, bool for_torch) const {
  const at::NoGradGuard no_grad;
  archive.write("pytorch_version", c10::IValue("1.5.0"));
  OutputArchive states(archive.compilation_unit());
  OutputArchive groups(archive.compilation_unit());
  groups.write("param_groups/size", at::tensor(static_cast<std::int64_t>(param_groups_.size())));
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    const OptionsBase& options = options_of(param_groups_[g]);
    const std::vector<Tensor>& parameters = param_groups_[g].params();
    OutputArchive group(archive.compilation_unit());
    group.write("params/size", at::tensor(static_cast<std::int64_t>(parameters.size())));
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      group.write("params/" + std::to_string(i), c10::IValue(key_of(parameters[i])));
      const auto found = state_.find(parameters[i].unsafeGetTensorImpl());
      if (found == state_.end()) continue;
      ParameterState state = static_cast<const ParameterState&>(*found->second);
      if (for_torch) {
        ParameterState plain;
        plain.step = state.step;
        for (const OptimStateName& kept : optim_states_at_most(rule_)) {
          if (!state.find(kept.name).defined()) continue;
          plain[kept.name] = ops::decode(state.find(kept.name), or_empty(state.find(scale_name(kept))),
                                         parameters[i], format_name(options), kept.is_signed);
        }
        state = std::move(plain);
      }
      OutputArchive one(archive.compilation_unit());
      state.serialize(one);
      states.write(key_of(parameters[i]), one);
    }
    OutputArchive written(archive.compilation_unit());
    options.serialize(written);
    group.write("options", written);
    groups.write("param_groups/" + std::to_string(g), group);
  }
  archive.write("state", states);
  archive.write("param_groups", groups);
}

void Optimizer::load(InputArchive& archive) {
  const at::NoGradGuard no_grad;
  const CategoryScope category(Category::kOptimizerState);
  InputArchive states;
  InputArchive groups;
  if (!archive.try_read("state", states) || !archive.try_read("param_groups", groups))
    throw ConfigError(rule_ +
                      ": there is no state or no param_groups in the archive: it is not an optimizer's");
  if (read_size(groups, "param_groups/size") != static_cast<std::int64_t>(param_groups_.size()))
    throw ConfigError(rule_ +
                      ": the file has another number of parameter groups; build the optimizer as it was");

  // Everything is read and made before anything is changed.
  const std::vector<std::string> ids = states.keys();
  std::set<std::string> left(ids.begin(), ids.end());
  std::vector<std::unique_ptr<OptionsBase>> options_loaded;
  decltype(state_) states_loaded;
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    InputArchive group;
    groups.read("param_groups/" + std::to_string(g), group);
    const std::vector<Tensor>& parameters = param_groups_[g].params();
    if (read_size(group, "params/size") != static_cast<std::int64_t>(parameters.size())) {
      throw ConfigError(rule_ + ": group " + std::to_string(g) +
                        " of the file has another number of parameters; build the optimizer as it was");
    }
    InputArchive written;
    group.read("options", written);
    OptionsBase& options = *options_loaded.emplace_back(cloned(options_of(param_groups_[g])));
    options.serialize(written);
    check_options(rule_, options);
    c10::IValue says_master;
    StateLayout layout{rule_, numbers(options), "", master_name(options),
                       written.try_read("master", says_master)};
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      c10::IValue key;
      group.read("params/" + std::to_string(i), key);
      left.erase(key.toStringRef());
      InputArchive one;
      if (!states.try_read(key.toStringRef(), one)) continue;
      const std::string who = rule_ + ": " + described(g, i, parameters[i]);
      layout.format = format_name(options, parameters[i]);
      auto state = std::make_unique<ParameterState>();
      state->layout = layout_of(options, parameters[i]);
      for (auto& [name, tensor] : restored(who, layout, parameters[i], read_tensors(who, one)))
        (name == "step" ? state->step : (*state)[name]) = tensor;
      states_loaded[parameters[i].unsafeGetTensorImpl()] = std::move(state);
    }
    // After states, by which more can be said.
    check_same_rule(rule_, options_of(param_groups_[g]), written.keys());
  }
  if (!left.empty()) {
    throw ConfigError(rule_ + ": the file has states of " + std::to_string(left.size()) +
                      " parameters that are in none of its groups; it is damaged, save it again");
  }
  for (std::size_t g = 0; g < param_groups_.size(); ++g)
    param_groups_[g].set_options(std::move(options_loaded[g]));
  state_ = std::move(states_loaded);
}

}  // namespace reef::optim
