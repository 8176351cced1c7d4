#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "pipeline/recompute.h"
#include "reef/pipeline_partition.h"
#include "reef/pipeline_schedule.h"

namespace reef {

/// Chooses which stages are recomputed on ranks that lack bytes. The profile must outlive it.
class RecomputePlanner {
 public:
  explicit RecomputePlanner(const PipelineProfile& profile) : profile_(profile) {}

  /// Returns the runs that take the least time to recompute and free `bytes[rank]` on each rank, counted over
  /// its passes in flight. On a rank where no choice frees so many, those that free the most. Each rank of
  /// the schedule has one or two chunks, and only ranks with one share it with others.
  RecomputedRuns runs(const PipelineCuts& cuts, const PipelineSchedule& schedule,
                      const std::vector<std::uint64_t>& bytes);

 private:
  class Freed;
  const std::vector<RecomputeChoice>& choices(const RecomputedRun& chunk);
  Freed freed(const RecomputedRun& chunk, const PipelineSchedule& schedule, std::uint32_t number);

  const PipelineProfile& profile_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<RecomputeChoice>> choices_;
};

}  // namespace reef
