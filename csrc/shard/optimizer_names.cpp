#include "shard/optimizer_names.h"

#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>

#include <optional>
#include <set>
#include <typeinfo>
#include <utility>

#include "reef/error.h"
#include "reef/part.h"
#include "shard/optimizer_options.h"

namespace reef {

using at::Tensor;

SteppedNames::SteppedNames(const std::vector<Tensor>& tensors, const std::vector<std::string>& names) {
  for (std::size_t i = 0; i < tensors.size(); ++i) names_.emplace(tensors[i].unsafeGetTensorImpl(), names[i]);
}

const std::string& SteppedNames::operator[](const Tensor& tensor) const {
  const auto name = names_.find(tensor.unsafeGetTensorImpl());
  if (name == names_.end()) {
    throw ConfigError(
        "the optimizer has a tensor that is none of parameters() of the shard or pipeline: give it those, "
        "and "
        "others an optimizer of their own");
  }
  return name->second;
}

std::string rule_of(const torch::optim::Optimizer& optimizer) {
  return c10::demangle(typeid(optimizer).name());
}

// Ids are addresses of tensors: torch's files have them, and reef's.
OptimizerState named_groups_of(const torch::optim::Optimizer& optimizer, const SteppedNames& names) {
  OptimizerState state;
  for (const auto& given : optimizer.param_groups()) {
    OptimizerState::Group& group = state.groups.emplace_back();
    group.options = option_values(given.options());
    for (const Tensor& tensor : given.params()) {
      group.names.push_back(names[tensor]);
      group.ids.push_back(std::to_string(reinterpret_cast<std::size_t>(tensor.unsafeGetTensorImpl())));
    }
  }
  return state;
}

OptimizerState named_state_of(const torch::optim::Optimizer& optimizer, const SteppedNames& names) {
  OptimizerState state = optimizer_state(optimizer);
  std::set<std::string> empty;  // ids: others keep these
  for (std::size_t g = 0; g < state.groups.size(); ++g) {
    for (std::size_t i = 0; i < state.groups[g].ids.size(); ++i) {
      const Tensor& part = optimizer.param_groups()[g].params()[i];
      state.groups[g].names.push_back(names[part]);
      const std::optional<Part> place = part_of(part);
      if (place && part.numel() == 0 && place->whole_elements > 0) empty.insert(state.groups[g].ids[i]);
    }
  }
  std::erase_if(state.states, [&](const auto& one) { return empty.contains(one.first); });
  return state;
}

KeptByOptimizer::KeptByOptimizer(torch::optim::Optimizer& optimizer) {
  for (const auto& [tensor, state] : optimizer.state()) states_.emplace_back(tensor, state->clone());
  for (const auto& group : optimizer.param_groups()) options_.push_back(group.options().clone());
}
KeptByOptimizer::~KeptByOptimizer() = default;

void KeptByOptimizer::put_back(torch::optim::Optimizer& optimizer) const {
  optimizer.state().clear();
  for (const auto& [tensor, state] : states_) optimizer.state()[tensor] = state->clone();
  for (std::size_t g = 0; g < options_.size(); ++g)
    optimizer.param_groups()[g].set_options(options_[g]->clone());
}

}  // namespace reef
