#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "reef/pipeline_partition.h"

namespace reef {

/// Throws ConfigError unless runs are ascending, of one stage at least, and within a model of so many stages.
void check_runs(const RecomputedRuns& runs, std::uint32_t stages);

/// Returns the parts of runs that are stages of a chunk.
RecomputedRuns runs_within(const RecomputedRuns& runs, const RecomputedRun& chunk);

/// Gives the bytes of what enters a run of stages, and so is kept of it: inputs, and what it takes of stages
/// before it.
std::uint64_t input_bytes(const PipelineProfile& profile, const RecomputedRun& run);

/// What a chunk may recompute, and what that does.
struct RecomputeChoice {
  RecomputedRuns runs;
  std::uint64_t kept_bytes = 0;  ///< of a pass, between its forward and backward pass
  std::uint64_t run_bytes = 0;   ///< the most that a run keeps while it is gone back through
  double seconds = 0;            ///< of what is recomputed, on a rank of speed 1
};

/// Returns choices for the chunk of these stages, in ascending order of seconds: for all that is not among
/// them there is one that is no slower and takes no more bytes, or nearly so where there are many.
std::vector<RecomputeChoice> recompute_choices(const PipelineProfile& profile, std::uint32_t first,
                                               std::uint32_t end);

/// Chooses what ranks that lack bytes recompute. The profile must outlive it.
class RecomputePlanner {
 public:
  explicit RecomputePlanner(const PipelineProfile& profile) : profile_(profile) {}

  /// Returns what takes the least time, and frees so many bytes on each rank, by what passes keep that are in
  /// flight at once; or, on a rank where nothing does, what frees the most. The schedule has one direction,
  /// and one or two chunks on each rank.
  RecomputedRuns runs(const PipelineCuts& cuts, const PipelineSchedule& schedule,
                      const std::vector<std::uint64_t>& bytes);

 private:
  class Freed;
  const std::vector<RecomputeChoice>& choices(const RecomputedRun& chunk);

  const PipelineProfile& profile_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<RecomputeChoice>> choices_;
};

}  // namespace reef
