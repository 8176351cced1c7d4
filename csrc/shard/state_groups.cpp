#include "shard/state_groups.h"

#include <map>
#include <set>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "reef/error.h"
#include "shard/state_rules.h"
#include "shard/together.h"

namespace reef {
namespace {

using c10::IValue;
using Group = OptimizerState::Group;

IValue tuple_of(std::vector<IValue> values) { return c10::ivalue::Tuple::create(std::move(values)); }

IValue packed(const std::vector<Group>& groups) {
  std::vector<IValue> all;
  for (const Group& group : groups) {
    std::vector<IValue> options;
    for (const auto& [key, value] : group.options) options.push_back(tuple_of({key, value}));
    all.push_back(
        tuple_of({tuple_of({group.names.begin(), group.names.end()}), tuple_of(std::move(options))}));
  }
  return tuple_of(std::move(all));
}

std::vector<Group> unpacked(const IValue& groups) {
  std::vector<Group> all;
  for (const IValue& one : groups.toTupleRef().elements()) {
    Group& group = all.emplace_back();
    const auto& parts = one.toTupleRef().elements();
    for (const IValue& name : parts[0].toTupleRef().elements()) group.names.push_back(name.toStringRef());
    for (const IValue& option : parts[1].toTupleRef().elements()) {
      const auto& pair = option.toTupleRef().elements();
      group.options.emplace_back(pair[0].toStringRef(), pair[1]);
    }
  }
  return all;
}

}  // namespace

std::vector<GroupNames> merged_groups(const DividedParameters& all, const std::vector<Group>& own,
                                      bool saved) {
  Together together(all.group, all.device());
  const std::vector<IValue> of_ranks = together.gather([&] { return packed(own); });
  std::vector<GroupNames> merged(own.size());
  together.here([&] {
    std::map<std::string, std::size_t> place;
    std::vector<Group> first;
    for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
      const std::vector<Group> theirs = unpacked(of_ranks[rank]);
      const std::string on_ranks = "the optimizers of ranks 0 and " + std::to_string(rank) + " ";
      if (rank == 0) first = theirs;
      if (const std::string differs = difference(first, theirs, saved); !differs.empty())
        throw ConfigError(on_ranks + differs + "; build the same on every rank");
      for (std::size_t g = 0; g < theirs.size(); ++g) {
        for (const std::string& part : theirs[g].names) {
          const std::string name = all.divided ? parse_piece_name(part).parameter : part;
          const auto [found, is_new] = place.emplace(name, g);
          if (found->second == g) continue;
          throw ConfigError("the ranks' optimizers have " + name + " in group " +
                            std::to_string(found->second) + " and, on rank " + std::to_string(rank) +
                            ", in group " + std::to_string(g) + "; make groups by Shard::param_groups()");
        }
      }
    }
    for (auto it = all.parameters.rbegin(); it != all.parameters.rend(); ++it) {
      if (const auto found = place.find(it->name); found != place.end())
        merged[found->second].push_back(it->name);
    }
  });
  together.agree();
  return merged;
}

void name_by_place(OptimizerState& state, const std::vector<GroupNames>& merged) {
  if (state.groups.size() != merged.size()) {
    throw ConfigError("the optimizer has " + std::to_string(merged.size()) + " parameter groups, and " +
                      std::to_string(state.groups.size()) +
                      " in the state that is loaded; build it as it was");
  }
  for (std::size_t g = 0; g < merged.size(); ++g) {
    Group& group = state.groups[g];
    if (!group.names.empty() && group.names.size() != group.ids.size()) {
      throw ConfigError("group " + std::to_string(g) + " of the state that is loaded has " +
                        std::to_string(group.ids.size()) + " parameters and names of " +
                        std::to_string(group.names.size()) + "; give it as it was saved");
    }
    if (!group.names.empty() || group.ids.empty()) continue;  // of a rank that keeps nothing
    if (group.ids.size() != merged[g].size()) {
      throw ConfigError("group " + std::to_string(g) + " has " + std::to_string(merged[g].size()) +
                        " parameters that require a gradient, and " + std::to_string(group.ids.size()) +
                        " in the state that is loaded, which does not name them; build it as it was");
    }
    group.names = merged[g];
  }
}

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

}  // namespace reef
