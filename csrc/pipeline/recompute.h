#pragma once

#include <cstdint>

#include "reef/pipeline_partition.h"

namespace reef {

/// Throws ConfigError unless runs are as RecomputedRuns says, and within a model of so many stages.
void check_runs(const RecomputedRuns& runs, std::uint32_t stages);

/// Returns the parts of the runs that lie within the stages of a chunk, each once.
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
/// Says what it costs to recompute these runs, which lie within the chunk of these stages.
RecomputeChoice recompute_choice(const PipelineProfile& profile, const RecomputedRun& chunk,
                                 RecomputedRuns runs);

}  // namespace reef
