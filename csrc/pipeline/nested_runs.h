#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "reef/pipeline_partition.h"
#include "reef/schedule.h"

namespace reef {

/// Returns the runs of stages that a schedule of a chain recomputes, whose stage 1 is stage `first` of the
/// model: a run lies in another one if it is recomputed once more when that one is. Nothing if the schedule
/// keeps something longer than until it has been used, or moves it.
std::optional<RecomputedRuns> runs_of_schedule(const Schedule& schedule, std::uint32_t first);

/// Returns ways to recompute these stages as a run: what plan_chain() recomputes when the run is recomputed,
/// within several budgets, from the least that it needs to what keeps everything. The run itself comes first
/// in each.
std::vector<RecomputedRuns> planned_runs(const PipelineProfile& profile, std::uint32_t first,
                                         std::uint32_t end);

}  // namespace reef
