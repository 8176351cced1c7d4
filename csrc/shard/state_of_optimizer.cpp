#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "reef/error.h"
#include "reef/optimizer_state.h"
#include "reef/shard.h"
#include "shard/optimizer_names.h"
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

}  // namespace

void Shard::agree_with_ranks(const std::string& failed, const std::string& rule) const {
  parts_->note("a state dict or param_groups()");
  reef::agree_with_ranks(parts_->divided.group, parts_->divided.device(), failed, rule);
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
  OptimizerState state = named_state_of(optimizer, SteppedNames(parameters(), names()));
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
    groups = named_groups_of(optimizer, SteppedNames(parameters(), names()));
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
