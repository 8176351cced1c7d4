#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <torch/serialize/archive.h>

#include <optional>

#include "optim/operators.h"
#include "optim/options.h"
#include "reef/error.h"
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
  archive.read(key, size);
  return size.item<std::int64_t>();
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
        for (const OptimStateName& kept : optim_states(rule_, numbers(options))) {
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
  InputArchive states;
  InputArchive groups;
  archive.read("state", states);
  archive.read("param_groups", groups);
  if (read_size(groups, "param_groups/size") != static_cast<std::int64_t>(param_groups_.size()))
    throw ConfigError(rule_ +
                      ": the file has another number of parameter groups; build the optimizer as it was");

  // Everything is read before anything is changed.
  struct Loaded {
    std::unique_ptr<OptionsBase> options;
    std::vector<std::optional<ParameterState>> states;
  };
  std::vector<Loaded> loaded;
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    InputArchive group;
    groups.read("param_groups/" + std::to_string(g), group);
    const std::vector<Tensor>& parameters = param_groups_[g].params();
    if (read_size(group, "params/size") != static_cast<std::int64_t>(parameters.size())) {
      throw ConfigError(rule_ + ": group " + std::to_string(g) +
                        " of the file has another number of parameters; build the optimizer as it was");
    }
    Loaded& into = loaded.emplace_back();
    InputArchive options;
    group.read("options", options);
    into.options = cloned(options_of(param_groups_[g]));
    into.options->serialize(options);
    check(*into.options);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      c10::IValue key;
      group.read("params/" + std::to_string(i), key);
      InputArchive one;
      auto& state = into.states.emplace_back();
      if (states.try_read(key.toStringRef(), one)) state.emplace().serialize(one);
    }
  }
  state_.clear();
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    param_groups_[g].set_options(std::move(loaded[g].options));
    for (std::size_t i = 0; i < loaded[g].states.size(); ++i) {
      if (loaded[g].states[i])
        adapt(options_of(param_groups_[g]), param_groups_[g].params()[i], *loaded[g].states[i]);
    }
  }
}

void Optimizer::adapt(const OptionsBase& options, const Tensor& parameter, const ParameterState& saved) {
  ParameterState& state = begin(options, parameter);
  state.step.copy_(saved.step);
  for (const OptimStateName& kept : optim_states(rule_, numbers(options))) {
    const Tensor value = saved.find(kept.name);
    const std::string scale = scale_name(kept);
    if (!value.defined()) continue;  // torch's SGD before its first step
    if (value.dtype() == state[kept.name].dtype() && value.sizes() == state[kept.name].sizes()) {
      state[kept.name].copy_(value);
      if (saved.find(scale).defined()) state[scale].copy_(saved.find(scale));
      continue;
    }
    const Tensor plain = at::empty_like(parameter, at::kFloat).copy_(value);
    const auto [codes, scales] =
        ops::encode(parameter, plain, format_name(options, parameter), kept.is_signed);
    state[kept.name] = codes;
    if (scales.numel() > 0) state[scale] = scales;
  }
  if (saved.find("master").defined() && state.find("master").defined())
    state["master"].copy_(saved.find("master"));
}

}  // namespace reef::optim
