#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "reef/pipeline_partition.h"
#include "reef/pipeline_simulation.h"

namespace reef::test {

/// Seconds of F, I and W of a chunk. Whole numbers are added up without rounding.
struct Times {
  double f = 1, i = 1, w = 1;
  double all() const { return f + i + w; }
};
inline constexpr Times kTimes[] = {{1, 1, 1}, {2, 2, 1}, {2, 3, 2}, {3, 2, 4},
                                   {1, 1, 3}, {1, 1, 0}, {5, 4, 3}};

/// Chunks that are all alike, and links that take no time.
inline PipelineCosts pipeline_costs(std::uint32_t chunks, const Times& times) {
  PipelineCosts costs;
  costs.chunks.assign(chunks, {});
  for (PipelineChunkCost& chunk : costs.chunks) {
    chunk.forward_seconds = times.f;
    chunk.input_seconds = times.i;
    chunk.weight_seconds = times.w;
  }
  return costs;
}

/// A link that each message occupies for so long.
inline Link occupied_for(double seconds) { return {0, 1, seconds}; }
/// A link that carries any number of messages at once, each for so long.
inline Link late_by(double seconds) { return {seconds, 1, 0}; }

/// A chain whose stages differ tenfold, with links that take about as long as a stage.
inline PipelineProfile random_chain(std::mt19937_64& random, std::uint32_t stages) {
  std::uniform_real_distribution<double> seconds(0.3, 3), ratio(1.5, 2.5);
  constexpr std::uint64_t kBytes[] = {1, 5, 20, 60};
  PipelineProfile profile;
  for (std::uint32_t i = 0; i < stages; ++i) {
    PipelineChunkCost stage;
    stage.forward_seconds = seconds(random);
    stage.input_seconds = stage.weight_seconds = stage.forward_seconds * ratio(random) / 2;
    stage.output_bytes = kBytes[random() % 4];
    profile.stages.push_back(stage);
  }
  profile.links = {{0, 20, 0}};
  return profile;
}

/// All ways to cut so many stages into so many chunks.
inline std::vector<PipelineCuts> every_cuts(std::uint32_t stages, std::uint32_t chunks) {
  std::vector<PipelineCuts> all{{}};
  for (std::uint32_t chunk = 1; chunk < chunks; ++chunk) {
    std::vector<PipelineCuts> longer;
    for (const PipelineCuts& cuts : all) {
      const std::uint32_t least = cuts.empty() ? 1 : cuts.back() + 1;
      for (std::uint32_t cut = least; cut + chunks - chunk <= stages; ++cut) {
        longer.push_back(cuts);
        longer.back().push_back(cut);
      }
    }
    all = std::move(longer);
  }
  return all;
}

/// Returns all ways to divide so many ranks among chunks that follow each other, each of which gets one at
/// least.
inline std::vector<std::vector<std::uint32_t>> every_ranks_per_chunk(std::uint32_t ranks) {
  std::vector<std::vector<std::uint32_t>> all;
  for (std::uint32_t bounds = 0; bounds < 1U << (ranks - 1); ++bounds) {
    std::vector<std::uint32_t>& each = all.emplace_back(1, 1U);
    for (std::uint32_t rank = 1; rank < ranks; ++rank) {
      if ((bounds >> (rank - 1) & 1) == 1) {
        each.push_back(1);
      } else {
        ++each.back();
      }
    }
  }
  return all;
}

}  // namespace reef::test
