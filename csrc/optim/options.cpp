#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "optim/options.h"
#include "optim/step.h"
#include "reef/error.h"
#include "reef/optim.h"

namespace reef::optim {

StateFormat state_format(const std::string& name) { return static_cast<StateFormat>(optim_format(name)); }

std::string described(std::size_t group, std::size_t index, const at::Tensor& parameter) {
  std::ostringstream text;
  text << "parameter " << index << " of group " << group << ", of shape " << parameter.sizes();
  return text.str();
}

namespace {

// As the kind of value that the option has; a whole number is a number, too.
c10::IValue of_kind(const std::string& key, const c10::IValue& kind, c10::IValue value) {
  if (kind.isDouble() && value.isInt()) return static_cast<double>(value.toInt());
  if (kind.isTuple()) {
    const bool listed = value.isTuple() || value.isList();
    const auto given = value.isTuple()  ? value.toTupleRef().elements().vec()
                       : value.isList() ? value.toListRef().vec()
                                        : std::vector<c10::IValue>{};
    const bool numbers = std::all_of(given.begin(), given.end(),
                                     [](const c10::IValue& one) { return one.isDouble() || one.isInt(); });
    if (!listed || given.size() != 2 || !numbers) {
      throw ConfigError(key + " are " +
                        (listed ? std::to_string(given.size()) + " values" : value.tagKind()) +
                        "; give two numbers");
    }
    return Betas(given[0].toScalar().toDouble(), given[1].toScalar().toDouble());
  }
  if (kind.tagKind() != value.tagKind())
    throw ConfigError(key + " is a value of kind " + value.tagKind() + "; give one of kind " +
                      kind.tagKind());
  return value;
}

}  // namespace

void OptionsBase::add(std::string key, c10::IValue value) {
  options_.push_back({std::move(key), std::move(value), false});
}

OptionsBase::Option* OptionsBase::find(const std::string& key) {
  const auto found =
      std::find_if(options_.begin(), options_.end(), [&](const Option& option) { return option.key == key; });
  return found == options_.end() ? nullptr : &*found;
}

bool OptionsBase::has(const std::string& key) const {
  return const_cast<OptionsBase*>(this)->find(key) != nullptr;
}

const c10::IValue& OptionsBase::get(const std::string& key) const {
  const Option* option = const_cast<OptionsBase*>(this)->find(key);
  if (option == nullptr) throw ConfigError("this optimizer has no option '" + key + "'");
  return option->value;
}

void OptionsBase::set(const std::string& key, c10::IValue value) {
  Option* option = find(key);
  if (option == nullptr) throw ConfigError("this optimizer has no option '" + key + "'");
  option->value = of_kind(key, option->value, std::move(value));
  option->set = true;
}

void OptionsBase::inherit(const OptionsBase& defaults) {
  for (Option& option : options_) {
    if (!option.set && defaults.has(option.key)) option.value = defaults.get(option.key);
  }
}

void check_options(const std::string& rule, const OptionsBase& options) {
  const auto refuse = [&](const std::string& key, double value, const char* give) {
    throw ConfigError(rule + ": " + key + " is " + std::to_string(value) + "; give " + give);
  };
  for (const char* key : {"lr", "weight_decay", "eps", "momentum", "alpha", "lr_decay",
                          "initial_accumulator_value", "trust_coefficient"}) {
    if (!options.has(key)) continue;
    const double value = options.get(key).toDouble();
    if (!(value >= 0) || std::isinf(value)) refuse(key, value, "0 or more");
  }
  if (options.has("dampening")) {
    const double value = options.get("dampening").toDouble();
    if (!std::isfinite(value)) refuse("dampening", value, "a number");
  }
  if (options.has("betas")) {
    const auto [beta1, beta2] = options.get("betas").to<Betas>();
    for (const double beta : {beta1, beta2}) {
      if (!(beta >= 0 && beta < 1)) refuse("a beta", beta, "a number from 0 to below 1");
    }
  }
  const auto choice = [&](const char* key, std::int64_t count) {
    const std::int64_t value = options.get(key).toInt();
    if (value < 0 || value >= count)
      refuse(key, static_cast<double>(value), "one that this version of Reef has");
  };
  choice("state", kernels::kOptimFormats);
  choice("master", static_cast<std::int64_t>(MasterWeights::kStochastic) + 1);
  const std::int64_t least = options.get("min_quantized_numel").toInt();
  if (least < 0) refuse("min_quantized_numel", static_cast<double>(least), "0 or more");
}

void check_nesterov(const std::string& rule, const OptionsBase& options) {
  if (options.has("nesterov") && options.get("nesterov").toBool() &&
      (options.get("momentum").toDouble() <= 0 || options.get("dampening").toDouble() != 0)) {
    throw ConfigError(rule + ": nesterov needs a momentum and no dampening");
  }
}

void OptionsBase::serialize(torch::serialize::OutputArchive& archive) const {
  for (const Option& option : options_) archive.write(option.key, option.value);
}

void OptionsBase::serialize(torch::serialize::InputArchive& archive) {
  for (Option& option : options_) {
    c10::IValue value;
    if (archive.try_read(option.key, value)) set(option.key, std::move(value));
  }
}

void ParameterState::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("step", c10::IValue(static_cast<std::int64_t>(step.item<float>())));
  for (const auto& [name, tensor] : tensors) archive.write(name, tensor, /*is_buffer=*/true);
}

void ParameterState::serialize(torch::serialize::InputArchive& archive) {
  step = at::ones({}, at::kFloat);  // torch's SGD counts none; with a momentum the first is over
  tensors.clear();
  for (const std::string& key : archive.keys()) {
    if (key == "step") {
      c10::IValue value;
      archive.read(key, value);
      step.fill_(value.toInt());
    } else {
      archive.read(key, (*this)[key], /*is_buffer=*/true);
    }
  }
}

at::Tensor& ParameterState::operator[](const std::string& name) {
  for (auto& [key, tensor] : tensors) {
    if (key == name) return tensor;
  }
  return tensors.emplace_back(name, at::Tensor()).second;
}

std::vector<at::Tensor> ParameterState::state_tensors() const {
  std::vector<at::Tensor> all;
  if (step.defined()) all.push_back(step);
  for (const auto& [name, tensor] : tensors) {
    if (tensor.defined()) all.push_back(tensor);
  }
  return all;
}

at::Tensor ParameterState::find(const std::string& name) const {
  for (const auto& [key, tensor] : tensors) {
    if (key == name) return tensor;
  }
  return {};
}

}  // namespace reef::optim
