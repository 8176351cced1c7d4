#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pipeline_run/chunk.h"
#include "pipeline_run/stages.h"
#include "reef/pipeline_schedule.h"

namespace reef {

/// A tensor that a stage gives to later ones by a name.
struct NamedSkip {
  std::string name;
  PipelineSkip between_stages;
};

/// Returns the skips of a model whose stages have told these names, in the order of the stages that give
/// them. Throws ConfigError unless one stage gives each, and later ones take it.
std::vector<NamedSkip> skips_of_names(const ToldNames& told);

/// The skips between chunks. The number of a skip is its index in these lists.
struct SkipsOfChunks {
  std::vector<PipelineSkip> skips;
  std::vector<std::string> names;

  ChunkSkips of_chunk(std::uint32_t chunk) const;
};
/// Leaves out those that stay within a chunk.
SkipsOfChunks skips_of_chunks(const std::vector<NamedSkip>& skips, const std::vector<std::uint32_t>& cuts);

}  // namespace reef
