#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "reef/pipeline_partition.h"

namespace reef {

/// Throws ConfigError unless runs are ascending, of one stage at least, and within a model of so many stages.
void check_runs(const RecomputedRuns& runs, std::uint32_t stages);

/// Returns the parts of the runs that lie within the stages of a chunk.
RecomputedRuns runs_within(const RecomputedRuns& runs, const RecomputedRun& chunk);

/// Returns the bytes of what enters a run of stages, which is what is kept of it: its inputs, and the skips
/// that it takes from stages before it.
std::uint64_t input_bytes(const PipelineProfile& profile, const RecomputedRun& run);

/// A way to recompute stages of a chunk, and what it costs.
struct RecomputeChoice {
  RecomputedRuns runs;
  std::uint64_t kept_bytes = 0;  ///< what a micro-batch keeps between its forward and backward pass
  std::uint64_t run_bytes = 0;   ///< the most that a recomputed run keeps during its backward pass
  double seconds = 0;            ///< what recomputing takes, on a rank of speed 1
};

/// Returns the choices for the chunk of these stages that may be best, in ascending order of seconds. They
/// are complete for chunks of up to 8 stages: any other choice is no faster than one of them that takes no
/// more bytes. In longer chunks some are left out.
std::vector<RecomputeChoice> recompute_choices(const PipelineProfile& profile, std::uint32_t first,
                                               std::uint32_t end);

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

  const PipelineProfile& profile_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<RecomputeChoice>> choices_;
};

}  // namespace reef
