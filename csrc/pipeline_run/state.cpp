#include "pipeline_run/state.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <type_traits>

#include "distributed/bytes_over_ranks.h"
#include "reef/error.h"
#include "reef/point_to_point.h"
#include "shard/prepared_load.h"
#include "shard/state_groups.h"
#include "shard/state_pieces.h"
#include "shard/together.h"

namespace reef {
namespace {

using at::Tensor;
using Group = OptimizerState::Group;

std::string whole_name(const std::string& name) { return parse_piece_name(name).parameter; }

template <class State>
Tensor bytes_of(const State& state) {
  torch::serialize::OutputArchive archive;
  if constexpr (std::is_same_v<State, StateDict>) {
    archive.write("state", c10::IValue(state));
  } else {
    archive << state;
  }
  std::ostringstream stream;
  archive.save_to(stream);
  const std::string text = std::move(stream).str();
  return at::from_blob(const_cast<char*>(text.data()), {static_cast<std::int64_t>(text.size())}, at::kByte)
      .clone();
}

template <class State>
State state_in(const Tensor& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(static_cast<const char*>(bytes.const_data_ptr()),
                    static_cast<std::size_t>(bytes.numel()));
  if constexpr (std::is_same_v<State, StateDict>) {
    c10::IValue value;
    archive.read("state", value);
    StateDict state;
    for (const auto& entry : value.toGenericDict())
      state.insert(entry.key().toStringRef(), entry.value().toTensor());
    return state;
  } else {
    State state;
    archive >> state;
    return state;
  }
}

/// Sends the state of each segment from its first rank to rank 0 and, unless `rank0_only`, to all ranks.
/// `own` has the states of this rank's segments. Memory: two segments.
template <class State>
std::vector<State> gathered(const std::vector<PipelineState::Segment>& segments, std::vector<State> own,
                            const ProcessGroupPtr& group, bool rank0_only) {
  const int rank = group->getRank();
  std::vector<State> all;
  auto next = own.begin();
  for (const PipelineState::Segment& segment : segments) {
    Tensor bytes;
    if (segment.shard != nullptr) {
      if (segment.first_rank == rank) bytes = bytes_of(*next);
      *next++ = State();
    }
    if (segment.first_rank != 0) {
      if (segment.first_rank == rank) send(bytes, 0, group);
      if (rank == 0) bytes = receive(static_cast<int>(segment.first_rank), group);
    }
    if (!rank0_only) bytes = broadcast_bytes(bytes, group, c10::kCPU);
    if (rank == 0 || !rank0_only) all.push_back(state_in<State>(bytes));
  }
  return all;
}

bool is_empty(const StateDict& dict) { return dict.empty(); }
bool is_empty(const OptimizerState& state) { return state.groups.empty(); }

/// Gives all ranks what rank 0 has, if any of them has nothing.
template <class State>
void share(std::vector<State>& given, Together& together, const ProcessGroupPtr& group) {
  std::erase_if(given, [](const State& state) { return is_empty(state); });
  const std::vector<std::int64_t> counts = together.tell(static_cast<std::int64_t>(given.size()));
  if (std::find(counts.begin(), counts.end(), 0) == counts.end()) return;
  std::vector<State> of_first;
  for (std::int64_t i = 0; i < counts.front(); ++i) {
    Tensor bytes;
    if (group->getRank() == 0) bytes = bytes_of(given[static_cast<std::size_t>(i)]);
    bytes = broadcast_bytes(bytes, group, c10::kCPU);
    of_first.push_back(state_in<State>(bytes));
  }
  given = std::move(of_first);
}

std::string text_of(const std::vector<Group>& groups) {
  std::ostringstream text;
  for (const Group& group : groups) {
    text << "(";
    for (const auto& [name, value] : group.options) text << name << " " << value << ", ";
    text << ") ";
  }
  return text.str();
}

/// What a state has of parameters for which `is_wanted` says so.
OptimizerState part_of_state(const OptimizerState& state,
                             const std::function<bool(const std::string& whole_name)>& is_wanted) {
  OptimizerState part;
  std::set<std::string> ids;
  for (const Group& group : state.groups) {
    Group& own = part.groups.emplace_back();
    own.options = group.options;
    for (std::size_t i = 0; i < group.ids.size(); ++i) {
      if (!is_wanted(whole_name(group.names[i]))) continue;
      own.ids.push_back(group.ids[i]);
      own.names.push_back(group.names[i]);
      ids.insert(group.ids[i]);
    }
  }
  for (const auto& each : state.states) {
    if (ids.contains(each.first)) part.states.push_back(each);
  }
  return part;
}

}  // namespace

PipelineState::PipelineState(ProcessGroupPtr group, std::vector<Segment> segments,
                             const StageNames& own_names, std::map<std::string, std::string> aliases)
    : group_(std::move(group)), segments_(std::move(segments)), aliases_(std::move(aliases)) {
  for (const auto& [stage, names] : names_on_all_ranks(own_names, group_)) {
    for (const std::string& name : names) places_.emplace(name, places_.size());
  }
}

std::size_t PipelineState::place_of(const std::string& name) const {
  const auto place = places_.contains(name) ? places_.find(name) : places_.find(whole_name(name));
  if (place == places_.end()) {
    throw ConfigError("the state that is loaded has " + name +
                      ", which the pipeline's model has not; build it as it was, or leave that out");
  }
  return place->second;
}

StateDict PipelineState::full_state_dict(bool rank0_only) {
  Together together(group_, c10::kCPU);
  std::vector<StateDict> own;
  of_each_segment(together, [&](const Segment& segment) {
    own.push_back(segment.shard->full_state_dict(/*rank0_only=*/true));
  });
  std::map<std::size_t, std::pair<std::string, Tensor>> in_order;
  for (const StateDict& dict : gathered(segments_, std::move(own), group_, rank0_only)) {
    for (const auto& entry : dict) in_order[places_.at(entry.key())] = {entry.key(), entry.value()};
  }
  if (!in_order.empty()) {
    for (const auto& [alias, name] : aliases_)
      in_order[places_.at(alias)] = {alias, in_order.at(places_.at(name)).second};
  }
  StateDict all;
  for (const auto& [place, entry] : in_order) all.insert(entry.first, entry.second);
  return all;
}

void PipelineState::load_state_dict(std::vector<StateDict> given) {
  Together together(group_, c10::kCPU);
  share(given, together, group_);
  together.here([&] {
    for (const StateDict& dict : given) {
      for (const auto& entry : dict) place_of(entry.key());
      for (const auto& [alias, name] : aliases_) {
        if (!dict.contains(alias) || !dict.contains(name) || at::equal(dict.at(alias), dict.at(name)))
          continue;
        throw ConfigError(alias + " and " + name +
                          " are one parameter here, and differ in the state that is loaded; leave one out");
      }
    }
    if (given.empty()) throw ConfigError("no rank has given a state to load: give one of the whole model");
  });
  together.agree();
  std::vector<PreparedLoad> prepared;
  of_each_segment(together, [&](const Segment& segment) {
    std::vector<StateDict> of_segment;
    for (const StateDict& dict : given) {
      StateDict& own = of_segment.emplace_back();
      for (const auto& entry : dict) {
        const auto alias = aliases_.find(entry.key());
        if (alias != aliases_.end() && dict.contains(alias->second)) continue;
        const std::string& name = alias != aliases_.end() ? alias->second : entry.key();
        if (segment.names.contains(name) || segment.names.contains(whole_name(name)))
          own.insert(name, entry.value());
      }
    }
    prepared.emplace_back(*segment.shard, of_segment);
  });
  for (const PreparedLoad& each : prepared) each.load();
}

/// Returns the names of a group's parameters on all ranks, in the model's order.
std::vector<std::string> PipelineState::group_names_of(const Group& own) const {
  std::string text;
  for (const std::string& name : own.names) text += whole_name(name) + "\n";
  std::map<std::size_t, std::string> names;
  for (const std::string& of_rank : gather_texts(text, group_, c10::kCPU)) {
    for (const std::string& name : lines_of(of_rank)) names.emplace(place_of(name), name);
  }
  std::vector<std::string> all;
  for (const auto& [place, name] : names) all.push_back(name);
  return all;
}

OptimizerState PipelineState::full_optimizer_state(const OptimizerState& own, bool rank0_only) {
  Together together(group_, c10::kCPU);
  together.agree_on("the groups of the optimizer", text_of(own.groups));
  std::vector<OptimizerState> parts;
  of_each_segment(together, [&](const Segment& segment) {
    const OptimizerState part =
        part_of_state(own, [&](const std::string& name) { return segment.trained.contains(name); });
    parts.push_back(segment.shard->full_optimizer_state(part, /*rank0_only=*/true));
  });
  OptimizerState all;
  std::vector<std::map<std::size_t, std::string>> names;  // of groups, in the model's order
  std::map<std::string, OptimizerState::Values> states;   // by name
  for (OptimizerState& part : gathered(segments_, std::move(parts), group_, rank0_only)) {
    if (all.groups.empty()) {
      for (const Group& group : part.groups) all.groups.push_back({{}, {}, group.options});
      names.resize(all.groups.size());
    }
    std::map<std::string, std::string> name_of;
    for (std::size_t g = 0; g < part.groups.size(); ++g) {
      for (std::size_t i = 0; i < part.groups[g].ids.size(); ++i) {
        const std::string& name = part.groups[g].names[i];
        name_of[part.groups[g].ids[i]] = name;
        names[g].emplace(place_of(name), name);
      }
    }
    for (auto& [id, values] : part.states) states[name_of.at(id)] = std::move(values);
  }
  std::size_t next = 0;
  for (std::size_t g = 0; g < all.groups.size(); ++g) {
    for (const auto& [place, name] : names[g]) {
      all.groups[g].names.push_back(name);
      const std::string& id = all.groups[g].ids.emplace_back(std::to_string(next++));
      if (const auto state = states.find(name); state != states.end())
        all.states.emplace_back(id, std::move(state->second));
    }
  }
  return all;
}

OptimizerState PipelineState::own_optimizer_state(const OptimizerState& own,
                                                  std::vector<OptimizerState> given,
                                                  const std::string& rule) {
  Together together(group_, c10::kCPU);
  share(given, together, group_);
  together.agree_on("the number of the optimizer's groups", std::to_string(own.groups.size()));
  std::vector<std::vector<std::string>> merged;
  for (const Group& group : own.groups) merged.push_back(group_names_of(group));
  OptimizerState found = own;
  found.states.clear();
  together.here([&] {
    for (OptimizerState& state : given) name_by_place(state, merged);
  });
  together.agree();
  of_each_segment(together, [&](const Segment& segment) {
    const auto is_own = [&](const std::string& name) { return segment.trained.contains(name); };
    std::vector<OptimizerState> parts;
    for (const OptimizerState& state : given) parts.push_back(part_of_state(state, is_own));
    OptimizerState part =
        segment.shard->own_optimizer_state(part_of_state(own, is_own), std::move(parts), rule);
    for (std::size_t g = 0; g < found.groups.size(); ++g) found.groups[g].options = part.groups[g].options;
    for (auto& state : part.states) found.states.push_back(std::move(state));
  });
  return found;
}

/// Does it for this rank's segments, and throws on all ranks if it has failed on any.
void PipelineState::of_each_segment(Together& together,
                                    const std::function<void(const Segment&)>& work) const {
  for (const Segment& segment : segments_) {
    if (segment.shard != nullptr) together.here_in_any_case([&] { work(segment); });
  }
  together.agree();
}

}  // namespace reef
