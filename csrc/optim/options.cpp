#include <torch/serialize/archive.h>

#include <algorithm>
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
  option->value = std::move(value);
  option->set = true;
}

void OptionsBase::inherit(const OptionsBase& defaults) {
  for (Option& option : options_) {
    if (!option.set && defaults.has(option.key)) option.value = defaults.get(option.key);
  }
}

void OptionsBase::serialize(torch::serialize::OutputArchive& archive) const {
  for (const Option& option : options_) archive.write(option.key, option.value);
}

void OptionsBase::serialize(torch::serialize::InputArchive& archive) {
  for (Option& option : options_) {
    c10::IValue value;
    if (archive.try_read(option.key, value)) {
      option.value = value;
      option.set = true;
    }
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
