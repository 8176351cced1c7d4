#include "reef/pipeline_partition.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "pipeline/division_search.h"
#include "pipeline/objective.h"
#include "pipeline/parcels.h"
#include "pipeline/recompute.h"
#include "reef/error.h"

namespace reef {
namespace {

using std::to_string;

void check_cuts(const PipelineProfile& profile, const PipelineCuts& cuts) {
  std::uint32_t begin = 0;
  for (const std::uint32_t cut : cuts) {
    if (cut <= begin || cut >= profile.stages.size())
      throw ConfigError("PipelineCuts: a chunk begins with stage " + to_string(cut) + " of " +
                        to_string(profile.stages.size()) + ", behind one that begins with stage " +
                        to_string(begin) + "; give ascending stages from 1, so that each chunk has one");
    begin = cut;
  }
  if (profile.stages.empty())
    throw ConfigError("PipelineProfile: a chain without a stage; give at least one");
}

/// Returns the skips between chunks.
std::vector<PipelineSkip> skips_of(const PipelineProfile& profile, const PipelineCuts& cuts) {
  const PipelineParcels checked(static_cast<std::uint32_t>(profile.stages.size()), profile.skips);
  std::vector<PipelineSkip> skips;
  for (PipelineSkip skip : profile.skips) {
    skip = between_chunks(std::move(skip), cuts);
    if (!skip.to.empty()) skips.push_back(std::move(skip));
  }
  return skips;
}

}  // namespace

std::string_view name(PipelineObjective objective) {
  switch (objective) {
    case PipelineObjective::kPipeDream:
      return "pipedream";
    case PipelineObjective::kDapple:
      return "dapple";
    case PipelineObjective::kPipeTorch:
      return "pipe_torch";
    case PipelineObjective::kSumAndMax:
      return "sum_and_max";
  }
  throw ConfigError("there is no such objective of cuts; use one of kPipelineObjectives");
}

RecomputedRuns whole_chunks(std::uint32_t stages, const PipelineCuts& cuts) {
  RecomputedRuns runs;
  for (std::size_t chunk = 0; chunk <= cuts.size(); ++chunk)
    runs.push_back({chunk == 0 ? 0 : cuts[chunk - 1], chunk < cuts.size() ? cuts[chunk] : stages});
  return runs;
}

PipelineCosts cut_costs(const PipelineProfile& profile, const PipelineCuts& cuts,
                        const RecomputedRuns& recomputed) {
  check_cuts(profile, cuts);
  const auto stages = static_cast<std::uint32_t>(profile.stages.size());
  check_runs(recomputed, stages);
  PipelineCosts costs{{}, profile.speeds, profile.links, skips_of(profile, cuts)};
  for (const RecomputedRun& chunk : whole_chunks(stages, cuts)) {
    PipelineChunkCost& cost = costs.chunks.emplace_back();
    for (std::uint32_t i = chunk.first; i < chunk.end; ++i) {
      const PipelineChunkCost& stage = profile.stages[i];
      cost.forward_seconds += stage.forward_seconds;
      cost.input_seconds += stage.input_seconds;
      cost.weight_seconds += stage.weight_seconds;
      cost.output_bytes = stage.output_bytes;
      cost.kept_after_input_bytes += stage.kept_after_input_bytes;
      cost.working_bytes = std::max(cost.working_bytes, stage.working_bytes);
      cost.fixed_bytes += stage.fixed_bytes;
      cost.gradient_bytes += stage.gradient_bytes;
    }
    const RecomputeChoice again = recompute_choice(profile, chunk, runs_within(recomputed, chunk));
    cost.kept_bytes = again.kept_bytes;
    cost.working_bytes += again.run_bytes;
    cost.input_seconds += again.seconds;
    if (chunk.first > 0) continue;
    cost.weight_seconds += std::exchange(cost.input_seconds, 0);
    cost.kept_after_input_bytes = cost.kept_bytes;
  }
  return costs;
}

double objective_seconds(PipelineObjective objective, const PipelineProfile& profile,
                         const PipelineCuts& cuts, std::span<const std::uint32_t> rank_of,
                         std::uint32_t micro_batches) {
  if (rank_of.size() != cuts.size() + 1)
    throw ConfigError("PipelineCuts: " + to_string(cuts.size() + 1) + " chunks are placed on " +
                      to_string(rank_of.size()) + " ranks; give one rank for each chunk");
  const std::vector<std::uint32_t> one_each(rank_of.size(), 1);
  return objective_seconds(objective, profile, PipelineDivision{cuts, one_each}, rank_of, micro_batches);
}

double objective_seconds(PipelineObjective objective, const PipelineProfile& profile,
                         const PipelineDivision& division, std::span<const std::uint32_t> order,
                         std::uint32_t micro_batches) {
  const auto& [cuts, ranks_per_chunk, seconds] = division;
  check_cuts(profile, cuts);
  const auto sum = std::accumulate(ranks_per_chunk.begin(), ranks_per_chunk.end(), std::uint64_t{0});
  if (ranks_per_chunk.size() != cuts.size() + 1 || sum != order.size() ||
      std::count(ranks_per_chunk.begin(), ranks_per_chunk.end(), 0U) > 0)
    throw ConfigError("PipelineDivision: " + to_string(cuts.size() + 1) + " chunks have " + to_string(sum) +
                      " ranks, and there are " + to_string(order.size()) +
                      "; give each chunk one at least, and as many as there are together");
  const PiecePrices prices(profile, order);
  PipelineValue value;
  std::uint32_t begin = 0, place = 0;
  for (std::size_t chunk = 0; chunk < ranks_per_chunk.size(); ++chunk) {
    const std::uint32_t end = chunk < cuts.size() ? cuts[chunk] : prices.stages();
    value = with(objective, value, prices.piece(place, ranks_per_chunk[chunk], begin, end), micro_batches);
    begin = end;
    place += ranks_per_chunk[chunk];
  }
  return seconds_of(objective, value);
}

std::vector<PipelineCuts> best_cuts(PipelineObjective objective, const PipelineProfile& profile,
                                    std::span<const std::uint32_t> rank_of, std::uint32_t micro_batches,
                                    std::size_t count) {
  if (rank_of.empty() || rank_of.size() > profile.stages.size())
    throw ConfigError("best_cuts: " + to_string(profile.stages.size()) + " stages cannot be cut into " +
                      to_string(rank_of.size()) + " chunks; give fewer ranks, or fewer chunks for each");
  const PiecePrices prices(profile, rank_of);
  std::vector<PipelineCuts> cuts;
  for (PipelineDivision& division :
       DivisionSearch(objective, prices, micro_batches, /*most_ranks=*/1).best(count))
    cuts.push_back(std::move(division.cuts));
  return cuts;
}

std::vector<PipelineDivision> best_divisions(PipelineObjective objective, const PipelineProfile& profile,
                                             std::span<const std::uint32_t> order,
                                             std::uint32_t micro_batches, std::size_t count) {
  if (order.empty() || profile.stages.empty() || micro_batches == 0)
    throw ConfigError(
        "best_divisions: there is no rank, no stage or no micro-batch; give at least one of each");
  const PiecePrices prices(profile, order);
  return DivisionSearch(objective, prices, micro_batches, micro_batches).best(count);
}

}  // namespace reef
