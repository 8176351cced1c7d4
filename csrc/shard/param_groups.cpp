#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "reef/error.h"
#include "reef/part.h"
#include "reef/shard.h"
#include "shard/shard_parts.h"
#include "shard/together.h"

namespace reef {

std::vector<Shard::ParameterGroup> Shard::param_groups(const GroupRule& rule) const {
  const Parts& parts = *parts_;
  parts.note("param_groups()");
  const auto name_of = [&](std::size_t i) {
    return parts.divided.divided ? parse_piece_name(parts.names[i]).parameter : parts.names[i];
  };
  Together together(parts.divided.group, parts.divided.device());
  std::vector<std::string> keys;
  const std::vector<c10::IValue> of_ranks = together.gather([&] {
    std::vector<c10::IValue> own;
    for (std::size_t i = 0; i < parts.parameters.size(); ++i) {
      keys.push_back(rule(name_of(i), whole_shape_of(parts.parameters[i])));
      own.emplace_back(keys.back());
    }
    return c10::IValue(c10::ivalue::Tuple::create(std::move(own)));
  });
  together.here([&] {
    for (std::size_t rank = 1; rank < of_ranks.size(); ++rank) {
      const auto& theirs = of_ranks[rank].toTupleRef().elements();
      const auto& first = of_ranks[0].toTupleRef().elements();
      for (std::size_t i = 0; i < theirs.size(); ++i) {
        if (theirs[i].toStringRef() == first[i].toStringRef()) continue;
        throw ConfigError("param_groups: the rule gives " + name_of(i) + " " + first[i].toStringRef() +
                          " on rank 0 and " + theirs[i].toStringRef() + " on rank " + std::to_string(rank) +
                          "; decide by name and shape alone");
      }
    }
  });
  together.agree();
  std::vector<ParameterGroup> groups;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    auto found = std::find_if(groups.begin(), groups.end(),
                              [&](const ParameterGroup& one) { return one.key == keys[i]; });
    if (found == groups.end()) found = groups.insert(found, {keys[i], {}});
    found->parameters.push_back(parts.parameters[i]);
  }
  return groups;
}

}  // namespace reef
