#include "pipeline_run/skips.h"

#include <algorithm>
#include <utility>

#include "pipeline/parcels.h"
#include "reef/error.h"

namespace reef {
namespace {

[[noreturn]] void refuse(std::uint32_t stage, const std::string& what) {
  throw ConfigError("reef::Pipeline: stage " + std::to_string(stage) + " " + what);
}

}  // namespace

std::vector<NamedSkip> skips_of_names(const ToldNames& told) {
  std::vector<NamedSkip> skips;
  const auto find = [&](const std::string& name) {
    return std::find_if(skips.begin(), skips.end(), [&](const NamedSkip& each) { return each.name == name; });
  };
  for (const auto& [stage, names] : told.gives) {
    for (const std::string& name : names) {
      if (const auto known = find(name); known != skips.end())
        refuse(stage, "gives '" + name + "', as stage " + std::to_string(known->between_stages.from) +
                          " does: give each skip a name of its own.");
      skips.push_back({name, {stage, {}}});
    }
  }
  for (const auto& [stage, names] : told.takes) {
    for (const std::string& name : names) {
      const auto skip = find(name);
      if (skip == skips.end()) refuse(stage, "takes '" + name + "', which no stage gives.");
      PipelineSkip& between = skip->between_stages;
      if (between.from >= stage)
        refuse(stage, "takes '" + name + "', which stage " + std::to_string(between.from) +
                          " gives: a skip goes to a later stage.");
      if (!between.to.empty() && between.to.back() == stage) refuse(stage, "takes '" + name + "' twice.");
      between.to.push_back(stage);
    }
  }
  for (const NamedSkip& skip : skips) {
    if (skip.between_stages.to.empty())
      refuse(skip.between_stages.from, "gives '" + skip.name + "', which no stage takes.");
  }
  return skips;
}

SkipsOfChunks skips_of_chunks(const std::vector<NamedSkip>& skips, const std::vector<std::uint32_t>& cuts) {
  SkipsOfChunks all;
  for (const NamedSkip& skip : skips) {
    PipelineSkip between = between_chunks(skip.between_stages, cuts);
    if (between.to.empty()) continue;
    all.skips.push_back(std::move(between));
    all.names.push_back(skip.name);
  }
  return all;
}

ChunkSkips SkipsOfChunks::of_chunk(std::uint32_t chunk) const {
  ChunkSkips own;
  for (std::size_t number = 0; number < skips.size(); ++number) {
    const auto& [from, to, bytes] = skips[number];
    if (from == chunk) own.gives.emplace_back(number, names[number]);
    if (std::binary_search(to.begin(), to.end(), chunk)) own.takes.emplace_back(number, names[number]);
  }
  return own;
}

}  // namespace reef
