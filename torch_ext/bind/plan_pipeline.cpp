#include "reef/plan_pipeline.h"

#include <torch/library.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pipeline_costs.h"
#include "reef/error.h"
#include "reef/pipeline_partition.h"

namespace {

using reef::bind::all_small;
using reef::bind::Floats;
using reef::bind::Ints;
using reef::bind::small;

reef::PipelineProfile profile_of(const std::vector<Floats>& seconds, const std::vector<Ints>& bytes,
                                 Floats speeds, const std::vector<Floats>& links,
                                 const std::vector<Ints>& skips, const Ints& rank_bytes = {}) {
  reef::PipelineProfile profile{reef::bind::pipeline_chunks_of(seconds, bytes),
                                std::move(speeds),
                                reef::bind::links_of(links),
                                {},
                                reef::bind::skips_of(skips)};
  for (const std::int64_t each : rank_bytes)
    profile.rank_bytes.push_back(reef::bind::bytes_of(each, "a rank"));
  return profile;
}

reef::PipelineObjective objective_of(const std::string& given) {
  std::string names;
  for (const reef::PipelineObjective objective : reef::kPipelineObjectives) {
    if (given == name(objective)) return objective;
    names += (names.empty() ? "" : ", ") + std::string(name(objective));
  }
  throw reef::ConfigError("'" + given + "' is no objective of cuts; use one of " + names);
}

std::vector<std::string> objectives() {
  std::vector<std::string> names;
  for (const reef::PipelineObjective objective : reef::kPipelineObjectives)
    names.emplace_back(name(objective));
  return names;
}

std::vector<Ints> cuts_of(const std::string& objective, const std::vector<Floats>& seconds,
                          const std::vector<Ints>& bytes, Floats speeds, const std::vector<Floats>& links,
                          const std::vector<Ints>& skips, const Ints& rank_of, std::int64_t micro_batches,
                          std::int64_t count) {
  std::vector<Ints> all;
  for (const reef::PipelineCuts& cuts :
       reef::best_cuts(objective_of(objective), profile_of(seconds, bytes, std::move(speeds), links, skips),
                       all_small(rank_of, "a rank"), small(micro_batches, "the number of micro-batches"),
                       small(count, "the number of cuts")))
    all.emplace_back(cuts.begin(), cuts.end());
  return all;
}

// Of each division its cuts, its ranks for each chunk, and its seconds.
using Divisions = std::tuple<std::vector<Ints>, std::vector<Ints>, Floats>;
Divisions divisions_of(const std::string& objective, const std::vector<Floats>& seconds,
                       const std::vector<Ints>& bytes, Floats speeds, const std::vector<Floats>& links,
                       const std::vector<Ints>& skips, const Ints& order, std::int64_t micro_batches,
                       std::int64_t count) {
  Divisions divisions;
  for (const reef::PipelineDivision& division : reef::best_divisions(
           objective_of(objective), profile_of(seconds, bytes, std::move(speeds), links, skips),
           all_small(order, "a rank"), small(micro_batches, "the number of micro-batches"),
           small(count, "the number of divisions"))) {
    std::get<0>(divisions).emplace_back(division.cuts.begin(), division.cuts.end());
    std::get<1>(divisions).emplace_back(division.ranks_per_chunk.begin(), division.ranks_per_chunk.end());
    std::get<2>(divisions).push_back(division.seconds);
  }
  return divisions;
}

// The cuts, the schedule, what is recomputed, the hops, and the text of a plan.
using Plan = std::tuple<Ints, std::string, Ints, Ints, std::string>;
Plan plan_of(const std::vector<Floats>& seconds, const std::vector<Ints>& bytes, Floats speeds,
             const std::vector<Floats>& links, const std::vector<Ints>& skips, const Ints& rank_bytes,
             std::int64_t ranks, std::int64_t micro_batches, bool may_split, bool may_recompute,
             bool may_replicate, std::vector<std::string> schedules, std::int64_t cuts, std::int64_t orders) {
  const reef::PipelinePlan plan = reef::plan_pipeline(
      profile_of(seconds, bytes, std::move(speeds), links, skips, rank_bytes),
      small(ranks, "the number of ranks"),
      {small(micro_batches, "the number of micro-batches"), may_split, may_recompute, may_replicate,
       std::move(schedules), small(cuts, "the number of cuts"), small(orders, "the number of orders")});
  return {Ints(plan.cuts.begin(), plan.cuts.end()), plan.schedule.json(),
          reef::bind::ends_of(plan.recomputed), Ints(plan.hops.begin(), plan.hops.end()), plan.text()};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def("pipeline_objectives() -> str[]", &objectives);
  m.def("best_cuts(str objective, " REEF_PIPELINE_COSTS
        ", int[] rank_of, int micro_batches, int count) -> int[][]",
        &cuts_of);
  m.def("best_divisions(str objective, " REEF_PIPELINE_COSTS
        ", int[] order, int micro_batches, int count) -> (int[][], int[][], float[])",
        &divisions_of);
  m.def("objective_seconds(str objective, " REEF_PIPELINE_COSTS
        ", int[] cuts, int[] rank_of, int micro_batches) -> float",
        [](const std::string& objective, const std::vector<Floats>& seconds, const std::vector<Ints>& bytes,
           Floats speeds, const std::vector<Floats>& links, const std::vector<Ints>& skips, const Ints& cuts,
           const Ints& rank_of, std::int64_t micro_batches) {
          return reef::objective_seconds(objective_of(objective),
                                         profile_of(seconds, bytes, std::move(speeds), links, skips),
                                         all_small(cuts, "a cut"), all_small(rank_of, "a rank"),
                                         small(micro_batches, "the number of micro-batches"));
        });
  m.def("cut_costs(" REEF_PIPELINE_COSTS ", int[] cuts, int[] recomputed) -> (float[][], int[][], int[][])",
        [](const std::vector<Floats>& seconds, const std::vector<Ints>& bytes, Floats speeds,
           const std::vector<Floats>& links, const std::vector<Ints>& skips, const Ints& cuts,
           const Ints& recomputed) {
          std::tuple<std::vector<Floats>, std::vector<Ints>, std::vector<Ints>> numbers;
          const reef::PipelineCosts costs =
              reef::cut_costs(profile_of(seconds, bytes, std::move(speeds), links, skips),
                              all_small(cuts, "a cut"), reef::bind::runs_of(recomputed));
          std::get<2>(numbers) = reef::bind::rows_of(costs.skips);
          for (const reef::PipelineChunkCost& chunk : costs.chunks) {
            std::get<0>(numbers).push_back(reef::bind::seconds_of(chunk));
            std::get<1>(numbers).push_back(reef::bind::counts_of(chunk));
          }
          return numbers;
        });
  m.def("plan_pipeline(" REEF_PIPELINE_COSTS
        ", int[] rank_bytes, int ranks, int micro_batches, bool may_split, bool may_recompute, bool "
        "may_replicate, str[] schedules, int cuts, int orders) -> (int[], str, int[], int[], str)",
        &plan_of);
}
