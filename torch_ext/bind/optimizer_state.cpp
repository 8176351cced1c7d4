#include "optimizer_state.h"

#include <string>
#include <vector>

namespace reef::bind {
namespace {

using c10::IValue;

const auto& elements_of(const IValue& tuple) { return tuple.toTupleRef().elements(); }
IValue tuple_of(std::vector<IValue> values) { return c10::ivalue::Tuple::create(std::move(values)); }

reef::OptimizerState::Values values_of(const IValue& tuple) {
  reef::OptimizerState::Values values;
  for (const IValue& pair : elements_of(tuple))
    values.emplace_back(elements_of(pair)[0].toStringRef(), elements_of(pair)[1]);
  return values;
}
std::vector<std::string> strings_of(const IValue& tuple) {
  std::vector<std::string> strings;
  for (const IValue& text : elements_of(tuple)) strings.push_back(text.toStringRef());
  return strings;
}

IValue tuple_of(const reef::OptimizerState::Values& values) {
  std::vector<IValue> all;
  for (const auto& [key, value] : values) all.push_back(tuple_of({key, value}));
  return tuple_of(std::move(all));
}
IValue tuple_of(const std::vector<std::string>& strings) {
  return tuple_of(std::vector<IValue>(strings.begin(), strings.end()));
}

}  // namespace

reef::OptimizerState::Communication communication_of(const IValue& data) {
  const auto& parts = elements_of(data);
  reef::OptimizerState::Communication found{
      parts[0].toStringRef(), parts[1].toInt(), values_of(parts[2]), {}};
  for (const IValue& of_rank : elements_of(parts[3])) {
    auto& [rank, values] = found.of_ranks.emplace_back();
    rank = elements_of(of_rank)[0].toInt();
    for (const IValue& one : elements_of(elements_of(of_rank)[1]))
      values.emplace_back(elements_of(one)[0].toStringRef(), values_of(elements_of(one)[1]));
  }
  return found;
}

reef::OptimizerState state_of(const IValue& data) {
  reef::OptimizerState state;
  for (const IValue& group : elements_of(elements_of(data)[0])) {
    const auto& parts = elements_of(group);
    state.groups.push_back({strings_of(parts[0]), strings_of(parts[1]), values_of(parts[2])});
  }
  for (const IValue& one : elements_of(elements_of(data)[1]))
    state.states.emplace_back(elements_of(one)[0].toStringRef(), values_of(elements_of(one)[1]));
  state.communication = communication_of(elements_of(data)[2]);
  return state;
}

IValue data_of(const reef::OptimizerState::Communication& communication) {
  std::vector<IValue> of_ranks;
  for (const auto& [rank, values] : communication.of_ranks) {
    std::vector<IValue> all;
    for (const auto& [name, of_name] : values) all.push_back(tuple_of({name, tuple_of(of_name)}));
    of_ranks.push_back(tuple_of({rank, tuple_of(std::move(all))}));
  }
  return tuple_of({communication.method, communication.ranks, tuple_of(communication.numbers),
                   tuple_of(std::move(of_ranks))});
}

IValue data_of(const reef::OptimizerState& state) {
  std::vector<IValue> groups, states;
  for (const auto& group : state.groups)
    groups.push_back(tuple_of({tuple_of(group.ids), tuple_of(group.names), tuple_of(group.options)}));
  for (const auto& [id, values] : state.states) states.push_back(tuple_of({id, tuple_of(values)}));
  return tuple_of({tuple_of(std::move(groups)), tuple_of(std::move(states)), data_of(state.communication)});
}

}  // namespace reef::bind
