#pragma once

#include <cstdint>
#include <vector>

#include "reef/pipeline_partition.h"
#include "reef/pipeline_schedule.h"

namespace reef {

/// Stages that the same ranks of a group have, as replicas of a pipeline, its two directions, and chunks on
/// several ranks make them.
struct PipelineSegment {
  std::vector<std::uint32_t> stages;  ///< ascending
  std::vector<std::int64_t> ranks;    ///< of the group, as ranks_of_stage() orders them
};

/// Gives the rank in the group of a rank of one of the replicas of a pipeline. Where replicas are cut alike,
/// ranks that have the same stages follow each other.
constexpr std::uint32_t rank_in_group(std::uint32_t rank, std::uint32_t replica, std::uint32_t replicas) {
  return rank * replicas + replica;
}

/// Returns the ranks of the group that have a stage: replica after replica, and ascending for each. `cuts`:
/// of each replica.
std::vector<std::int64_t> ranks_of_stage(const PipelineSchedule& schedule,
                                         const std::vector<PipelineCuts>& cuts, std::uint32_t stage);

/// Returns the segments of a model of so many stages, in the order of their first stages, for pipelines that
/// each run the schedule.
std::vector<PipelineSegment> pipeline_segments(const PipelineSchedule& schedule,
                                               const std::vector<PipelineCuts>& cuts, std::uint32_t stages);

/// Returns a schedule of forward passes only, by which the same ranks serve, and the outputs of all
/// micro-batches are on one rank: that of `schedule` itself if it has one direction. Ranks of a chunk take
/// turns, but for the last chunk, which is computed by the first of its ranks. Where ranks have one chunk in
/// one direction and another one in the other, all micro-batches take the first direction.
PipelineSchedule serving_schedule(const PipelineSchedule& schedule);

}  // namespace reef
