#pragma once

#include <cstdint>
#include <vector>

#include "reef/pipeline_schedule.h"

namespace reef {

/// Chunks that the same ranks of a group have, as replicas of a pipeline and its two directions make them.
struct PipelineSegment {
  std::vector<std::uint32_t> chunks;  ///< ascending
  std::vector<std::int64_t> ranks;    ///< of the group, ascending
};

/// Gives the rank in the group of a rank of one of the replicas of a pipeline. Ranks that have the same
/// chunks follow each other.
constexpr std::uint32_t rank_in_group(std::uint32_t rank, std::uint32_t replica, std::uint32_t replicas) {
  return rank * replicas + replica;
}

/// Returns the ranks of the group that have a chunk, ascending.
std::vector<std::int64_t> ranks_of_chunk(const PipelineSchedule& schedule, std::uint32_t replicas,
                                         std::uint32_t chunk);

/// Returns the segments of so many pipelines that each run the schedule, in the order of their first chunks.
std::vector<PipelineSegment> pipeline_segments(const PipelineSchedule& schedule, std::uint32_t replicas);

/// Returns a schedule of forward passes only, by which the same ranks serve: that of `schedule` itself, or,
/// where that has two directions, one of the first direction for all micro-batches.
PipelineSchedule serving_schedule(const PipelineSchedule& schedule);

}  // namespace reef
