#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reef/export.h"
#include "reef/pipeline_partition.h"
#include "reef/pipeline_schedule.h"
#include "reef/pipeline_simulation.h"

namespace reef {

/// Pure data and pure code (no Torch): which schedule, how deep, and where to cut, for the stages, ranks and
/// links that were measured.

struct PipelinePlanOptions {
  std::uint32_t micro_batches = 1;
  bool may_split = true;  ///< backward passes, into I and W
  /// Lets the plan recompute stages on ranks that lack bytes, as few as make each schedule and cut fit.
  bool may_recompute = false;
  /// Lets the plan give a chunk to several ranks (PipelineShape::ranks_per_chunk, "chimera", "dualpipe"),
  /// each of which adds up its own micro-batches' gradients first. Then there may be more ranks than stages.
  bool may_replicate = false;
  /// Names of the table, of which one is chosen; empty stands for all that are synchronous and, unless the
  /// plan may replicate, have one direction. Of asynchronous ones an update is a batch.
  std::vector<std::string> schedules = {};
  /// How many cuts are tried for each placement of chunks, those of the least PipelineObjective::kSumAndMax.
  std::uint32_t cuts = 16;
  /// How many orders of ranks are tried where their speeds, links or bytes differ. More than six ranks, and
  /// those of asynchronous schedules, stay in the order that is given.
  std::uint32_t orders = 4;
};

struct PipelinePlan {
  PipelineCuts cuts;
  /// For the ranks as the profile numbers them; of an asynchronous one four batches.
  PipelineSchedule schedule;
  PipelineCosts costs;  ///< of the chunks
  RecomputedRuns recomputed = {};
  PipelineCost cost = {};
  /// The hops of the schedule, empty if it has none. Its name, these and the cuts are the options of a
  /// pipeline that trains by it.
  std::vector<std::uint32_t> hops = {};

  /// Writes what was chosen and what it costs: a line of sums, and one for each rank.
  REEF_API std::string text() const;
};

/// Finds the fastest of many schedules by simulate() that fits into each rank's bytes: all named ones that
/// are synchronous and have one direction, at depths up to what hides the links, and greedy_pipeline() with
/// 1, 2, 4 and more passes of each chunk in flight, each for the best cuts. With may_replicate also those
/// that take ranks_per_chunk, each for the best divisions, and those of two directions. Asynchronous ones
/// where `schedules` names them: four batches are compared. Throws BudgetError, which names the rank and how
/// many bytes it lacks, if none fits; ConfigError for a profile of fewer stages than ranks, no micro-batch,
/// schedules that are not in the table, two directions without may_replicate, and asynchronous names beside
/// others.
REEF_API PipelinePlan plan_pipeline(const PipelineProfile& profile, std::uint32_t ranks,
                                    const PipelinePlanOptions& options);

}  // namespace reef
