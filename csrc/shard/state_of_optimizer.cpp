#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <set>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "reef/error.h"
#include "reef/optimizer_state.h"
#include "reef/shard.h"
#include "shard/shard_parts.h"

namespace reef {

using at::Tensor;
using c10::IValue;

namespace {

using Group = OptimizerState::Group;
using Names = std::vector<std::string>;

IValue tuple_of(const Names& names) {
  std::vector<IValue> values(names.begin(), names.end());
  return c10::ivalue::Tuple::create(std::move(values));
}

// Which parameters are in each group, on any rank, in the module's order.
std::vector<Names> merged_groups(const DividedParameters& all, const std::vector<Group>& own) {
  std::vector<IValue> groups;
  for (const Group& group : own) groups.push_back(tuple_of(group.names));
  const std::vector<IValue> of_ranks = gather_values(all, c10::ivalue::Tuple::create(std::move(groups)));
  std::vector<Names> merged;
  for (std::size_t g = 0; g < own.size(); ++g) {
    std::set<std::string> names;
    for (const IValue& of_rank : of_ranks) {
      const auto& theirs = of_rank.toTupleRef().elements();
      if (theirs.size() != own.size()) {
        throw ConfigError("the ranks' optimizers have " + std::to_string(own.size()) + " and " +
                          std::to_string(theirs.size()) + " parameter groups; build the same on every rank");
      }
      for (const IValue& name : theirs[g].toTupleRef().elements())
        names.insert(all.divided ? parse_piece_name(name.toStringRef()).parameter : name.toStringRef());
    }
    Names& in_order = merged.emplace_back();
    for (auto it = all.parameters.rbegin(); it != all.parameters.rend(); ++it) {
      if (names.count(it->name) > 0) in_order.push_back(it->name);
    }
  }
  return merged;
}

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

// Of a file that does not say which parameters it has: torch's own.
void name_by_place(OptimizerState& state, const std::vector<Names>& merged) {
  if (state.groups.size() != merged.size()) {
    throw ConfigError("the optimizer has " + std::to_string(merged.size()) + " parameter groups, and " +
                      std::to_string(state.groups.size()) +
                      " in the state that is loaded; build it as it was");
  }
  for (std::size_t g = 0; g < merged.size(); ++g) {
    Group& group = state.groups[g];
    if (!group.names.empty() || group.ids.empty()) continue;  // of a rank that keeps nothing
    if (group.ids.size() != merged[g].size()) {
      throw ConfigError("group " + std::to_string(g) + " has " + std::to_string(merged[g].size()) +
                        " parameters that require a gradient, and " + std::to_string(group.ids.size()) +
                        " in the state that is loaded, which does not name them; build it as it was");
    }
    group.names = merged[g];
  }
}

// Before states are looked for: a parameter that took no step has none.
void check_known(const std::vector<Group>& own, const std::vector<OptimizerState>& given) {
  if (given.empty()) return;
  for (std::size_t g = 0; g < own.size(); ++g) {
    std::set<std::string> known;
    for (const OptimizerState& state : given) {
      for (const std::string& name : state.groups[g].names) {
        known.insert(name);
        known.insert(parse_piece_name(name).parameter);
      }
    }
    for (const std::string& name : own[g].names) {
      if (known.count(name) == 0 && known.count(parse_piece_name(name).parameter) == 0) {
        throw ConfigError(name + " is not in group " + std::to_string(g) +
                          " of the state that is loaded; build the optimizer as it was");
      }
    }
  }
}

// Ids are addresses of tensors: torch's files have them, and reef's.
OptimizerState groups_of(const torch::optim::Optimizer& optimizer, const Shard& shard) {
  std::map<const void*, std::string> names;
  for (std::size_t i = 0; i < shard.names().size(); ++i)
    names.emplace(shard.parameters()[i].unsafeGetTensorImpl(), shard.names()[i]);
  OptimizerState state;
  for (const auto& given : optimizer.param_groups()) {
    Group& group = state.groups.emplace_back();
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

}  // namespace

OptimizerState Shard::full_optimizer_state(const OptimizerState& own, bool rank0_only) {
  const DividedParameters& all = parts_->divided;
  OptimizerState whole;
  const std::vector<Names> merged = merged_groups(all, own.groups);
  const bool keep = !rank0_only || all.group->getRank() == 0;
  NamedState states = whole_state(all, by_name(own), keep);
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

OptimizerState Shard::own_optimizer_state(const OptimizerState& own, std::vector<OptimizerState> given) {
  const DividedParameters& all = parts_->divided;
  given.erase(std::remove_if(given.begin(), given.end(), [](const auto& one) { return one.groups.empty(); }),
              given.end());
  const std::vector<Names> merged = merged_groups(all, own.groups);
  std::vector<NamedState> pieces;
  NamedState options;
  agree(all, [&] {
    for (OptimizerState& state : given) {
      name_by_place(state, merged);
      pieces.push_back(by_name(state));
    }
    check_known(own.groups, given);
    if (given.empty()) return;
    for (const Group& group : given.front().groups) options.emplace_back("", group.options);
  });
  std::map<std::string, StateValues> states;
  for (auto& [name, values] : own_state(all, pieces, options)) states.emplace(name, std::move(values));
  OptimizerState found;
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
  OptimizerState own;
  agree(parts_->divided, [&] { own = sharded_optimizer_state(optimizer); });
  return full_optimizer_state(own, rank0_only);
}

OptimizerState Shard::sharded_optimizer_state(const torch::optim::Optimizer& optimizer) const {
  parts_->wait_for_update();
  OptimizerState state = optimizer_state(optimizer);
  const OptimizerState groups = groups_of(optimizer, *this);
  for (std::size_t g = 0; g < groups.groups.size(); ++g) state.groups[g].names = groups.groups[g].names;
  return state;
}

void Shard::load_optimizer_state(torch::optim::Optimizer& optimizer, std::vector<OptimizerState> given) {
  parts_->wait_for_update();
  OptimizerState groups;
  agree(parts_->divided, [&] { groups = groups_of(optimizer, *this); });
  const OptimizerState state = own_optimizer_state(groups, std::move(given));
  agree(parts_->divided, [&] { reef::load_optimizer_state(optimizer, state); });
}

}  // namespace reef
