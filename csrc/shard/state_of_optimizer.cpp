#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <typeinfo>
#include <utility>

#include "reef/error.h"
#include "reef/optimizer_state.h"
#include "reef/part.h"
#include "reef/shard.h"
#include "shard/optimizer_options.h"
#include "shard/shard_parts.h"
#include "shard/state_groups.h"
#include "shard/state_of_exchange.h"
#include "shard/state_rules.h"
#include "shard/together.h"

namespace reef {

using at::Tensor;

namespace {

using Group = OptimizerState::Group;

NamedState by_name(const OptimizerState& state) {
  std::map<std::string, std::string> names;
  for (const Group& group : state.groups) {
    for (std::size_t i = 0; i < group.ids.size(); ++i) names.emplace(group.ids[i], group.names[i]);
  }
  NamedState named;
  for (const auto& [id, values] : state.states) {
    if (const auto name = names.find(id); name != names.end()) named.emplace_back(name->second, values);
  }
  return named;
}

// Ids are addresses of tensors: torch's files have them, and reef's.
OptimizerState groups_of(const torch::optim::Optimizer& optimizer, const Shard& shard) {
  std::map<const void*, std::string> names;
  for (std::size_t i = 0; i < shard.names().size(); ++i)
    names.emplace(shard.parameters()[i].unsafeGetTensorImpl(), shard.names()[i]);
  OptimizerState state;
  for (const auto& given : optimizer.param_groups()) {
    Group& group = state.groups.emplace_back();
    group.options = option_values(given.options());
    for (const Tensor& tensor : given.params()) {
      const auto name = names.find(tensor.unsafeGetTensorImpl());
      if (name == names.end()) {
        throw ConfigError(
            "the optimizer has a tensor that is none of this shard's parameters(): give it those, "
            "and others an optimizer of their own");
      }
      group.ids.push_back(std::to_string(reinterpret_cast<std::size_t>(tensor.unsafeGetTensorImpl())));
      group.names.push_back(name->second);
    }
  }
  return state;
}

std::string rule_of(const torch::optim::Optimizer& optimizer) {
  return c10::demangle(typeid(optimizer).name());
}

void agree_on_rule(const DividedParameters& all, const torch::optim::Optimizer& optimizer) {
  Together(all.group, all.device()).agree_on("the optimizer", rule_of(optimizer));
}

// It steps along one direction of all parameters together, and keeps its own under the first.
void check_steps_elements(const DividedParameters& all, const torch::optim::Optimizer& optimizer) {
  if (!all.divided || rule_of(optimizer).find("LBFGS") == std::string::npos) return;
  throw ConfigError(
      "the optimizer is " + rule_of(optimizer) +
      ", which needs whole parameters, and has parts of them: take one that steps each element by "
      "itself, or stage kReplicate");
}

// What load() replaces.
class KeptByOptimizer {
 public:
  explicit KeptByOptimizer(torch::optim::Optimizer& optimizer) {
    for (const auto& [tensor, state] : optimizer.state()) states_.emplace_back(tensor, state->clone());
    for (const auto& group : optimizer.param_groups()) options_.push_back(group.options().clone());
  }
  void put_back(torch::optim::Optimizer& optimizer) const {
    optimizer.state().clear();
    for (const auto& [tensor, state] : states_) optimizer.state()[tensor] = state->clone();
    for (std::size_t g = 0; g < options_.size(); ++g)
      optimizer.param_groups()[g].set_options(options_[g]->clone());
  }

 private:
  std::vector<std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>> states_;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_;
};

}  // namespace

void Shard::agree_with_ranks(const std::string& failed, const std::string& rule) const {
  parts_->note("a state dict or param_groups()");
  Together together(parts_->divided.group, parts_->divided.device());
  together.here([&] {
    if (!failed.empty()) throw ConfigError(failed);
  });
  try {
    together.agree();
  } catch (const ConfigError&) {
    if (failed.empty()) throw;  // who has failed says it in its own words
    return;
  }
  Together(parts_->divided.group, parts_->divided.device()).agree_on("the optimizer", rule);
}

OptimizerState Shard::full_optimizer_state(const OptimizerState& own, bool rank0_only) {
  parts_->note("full_optimizer_state()");
  const DividedParameters& all = parts_->divided;
  OptimizerState whole;
  const std::vector<GroupNames> merged = merged_groups(all, own.groups, /*saved=*/true);
  const bool keep = !rank0_only || all.group->getRank() == 0;
  NamedState states = whole_state(all, by_name(own), keep);
  whole.communication = StateOfExchange(all, *parts_->reducer).whole(keep);
  if (!keep) return whole;
  std::map<std::string, std::string> ids;
  for (std::size_t g = 0; g < merged.size(); ++g) {
    Group& group = whole.groups.emplace_back();
    group.names = merged[g];
    group.options = own.groups[g].options;
    for (const std::string& name : group.names)
      group.ids.push_back(ids.emplace(name, std::to_string(ids.size())).first->second);
  }
  for (auto& [name, values] : states) whole.states.emplace_back(ids.at(name), std::move(values));
  return whole;
}

OptimizerState Shard::own_optimizer_state(const OptimizerState& own, std::vector<OptimizerState> given,
                                          const std::string& rule) {
  parts_->note("load_optimizer_state()");
  const DividedParameters& all = parts_->divided;
  given.erase(std::remove_if(given.begin(), given.end(), [](const auto& one) { return one.groups.empty(); }),
              given.end());
  const std::vector<GroupNames> merged = merged_groups(all, own.groups, /*saved=*/false);
  std::vector<NamedState> pieces;
  NamedState options;
  agree(all, [&] {
    for (OptimizerState& state : given) {
      name_by_place(state, merged);
      check_rule(all, rule, own.groups, state);
      pieces.push_back(by_name(state));
    }
    check_known(own.groups, given);
    if (given.empty()) return;
    for (const Group& group : given.front().groups) options.emplace_back("", group.options);
  });
  std::map<std::string, StateValues> states;
  for (auto& [name, values] : own_state(all, pieces, options)) states.emplace(name, std::move(values));
  OptimizerState found;
  std::vector<OptimizerState::Communication> communication;
  for (OptimizerState& state : given) communication.push_back(std::move(state.communication));
  found.communication = StateOfExchange(all, *parts_->reducer).resharded(communication);
  // An optimizer that takes it up may touch its parts, of which some ranks have no elements.
  if (parts_->gatherer && parts_->update == nullptr) parts_->gatherer->expect_step();
  for (std::size_t g = 0; g < own.groups.size(); ++g) {
    Group& group = found.groups.emplace_back(own.groups[g]);
    group.options = options[g].second;
    for (std::size_t i = 0; i < group.ids.size(); ++i) {
      if (const auto one = states.find(group.names[i]); one != states.end())
        found.states.emplace_back(group.ids[i], std::move(one->second));
    }
  }
  return found;
}

OptimizerState Shard::full_optimizer_state(const torch::optim::Optimizer& optimizer, bool rank0_only) {
  parts_->note("full_optimizer_state()");
  OptimizerState own;
  agree(parts_->divided, [&] { own = sharded_optimizer_state(optimizer); });
  agree_on_rule(parts_->divided, optimizer);
  return full_optimizer_state(own, rank0_only);
}

OptimizerState Shard::sharded_optimizer_state(const torch::optim::Optimizer& optimizer) const {
  check_steps_elements(parts_->divided, optimizer);
  parts_->wait_for_update();
  OptimizerState state = optimizer_state(optimizer);
  const OptimizerState groups = groups_of(optimizer, *this);
  std::set<std::string> empty;  // ids: others keep these
  for (std::size_t g = 0; g < groups.groups.size(); ++g) {
    state.groups[g].names = groups.groups[g].names;
    for (std::size_t i = 0; i < state.groups[g].ids.size(); ++i) {
      const Tensor& part = optimizer.param_groups()[g].params()[i];
      const std::optional<Part> place = part_of(part);
      if (place && part.numel() == 0 && place->whole_elements > 0) empty.insert(state.groups[g].ids[i]);
    }
  }
  std::erase_if(state.states, [&](const auto& one) { return empty.contains(one.first); });
  state.communication = communication();
  for (auto& [rank, of_rank] : state.communication.of_ranks) of_rank = unpacked_state(packed_state(of_rank));
  return state;
}

void Shard::load_optimizer_state(torch::optim::Optimizer& optimizer, std::vector<OptimizerState> given) {
  parts_->note("load_optimizer_state()");
  OptimizerState groups;
  agree(parts_->divided, [&] {
    check_steps_elements(parts_->divided, optimizer);
    parts_->wait_for_update();
    groups = groups_of(optimizer, *this);
  });
  agree_on_rule(parts_->divided, optimizer);
  OptimizerState state = own_optimizer_state(groups, std::move(given), rule_of(optimizer));
  const OptimizerState::Communication own = std::exchange(state.communication, {});
  const KeptByOptimizer before(optimizer);
  const OptimizerState::Communication held_back = communication();
  Together together(parts_->divided.group, parts_->divided.device());
  together.here([&] {
    reef::load_optimizer_state(optimizer, state);
    load_communication(own);
  });
  try {
    together.agree();
  } catch (...) {
    before.put_back(optimizer);
    load_communication(held_back);
    throw;
  }
}

}  // namespace reef
