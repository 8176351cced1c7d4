#include "pipeline_run/planned.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "pipeline/segments.h"
#include "reef/measure_pipeline.h"
#include "reef/plan_pipeline.h"
#include "reef/subgroup.h"
#include "shard/together.h"
#include "surroundings.h"

namespace reef {

std::string plan_for_sample(const std::vector<Pipeline::Maker>& stages, const ProcessGroupPtr& group,
                            PipelineOptions& options) {
  const PipelineSample& sample = *options.sample;
  const std::uint32_t ranks = static_cast<std::uint32_t>(group->getSize()) / options.replicas;
  std::vector<std::int64_t> of_first;
  for (std::uint32_t rank = 0; rank < ranks; ++rank)
    of_first.push_back(rank_in_group(rank, /*replica=*/0, options.replicas));
  const ProcessGroupPtr first = options.replicas == 1 ? group : subgroup(group, of_first);
  // Replicas that divide optimizers' states have a part of them each.
  const double divisor = options.shard.stage == Stage::kReplicate ? 1 : options.replicas;
  std::string schedule, text;
  std::vector<std::int64_t> cuts, recomputed;  // of runs the first stage and the end, one after another
  Together together(group, c10::kCPU);
  together.here([&] {
    if (!first) return;
    const SurroundingsScope generators_are_kept{Surroundings({})};  // makers may use random numbers
    PipelineProfile profile = measure_pipeline(stages, sample.micro_batch, first,
                                               {.state_bytes_per_byte = sample.state_bytes_per_byte / divisor,
                                                .rank_bytes = sample.rank_bytes,
                                                .loss = sample.loss});
    if (options.replicas > 1) {  // a rank's own sums of gradients are apart from those of all
      for (PipelineChunkCost& stage : profile.stages) stage.fixed_bytes += stage.gradient_bytes;
    }
    PipelinePlanOptions wanted{.micro_batches = options.micro_batches,
                               .may_recompute = options.recompute,
                               .may_replicate = sample.may_replicate};
    if (!options.schedule.empty()) wanted.schedules = {options.schedule};
    const PipelinePlan plan = plan_pipeline(profile, ranks, wanted);
    schedule = plan.schedule.json();
    for (const RecomputedRun& run : plan.recomputed)
      recomputed.insert(recomputed.end(), {run.first, run.end});
    text = plan.text();
    cuts.assign(plan.cuts.begin(), plan.cuts.end());
  });
  const c10::IValue told =
      together.broadcast([&] { return c10::IValue(std::make_tuple(schedule, text, cuts, recomputed)); });
  const auto& of_all = told.toTupleRef().elements();
  options.actions = pipeline_schedule_from_json(of_all[0].toStringRef());
  options.cuts.clear();
  for (const std::int64_t cut : of_all[2].toIntVector())
    options.cuts.push_back(static_cast<std::uint32_t>(cut));
  options.recompute = false;
  const std::vector<std::int64_t> ends = of_all[3].toIntVector();
  for (std::size_t i = 0; i + 1 < ends.size(); i += 2)
    options.recomputed.push_back(
        {static_cast<std::uint32_t>(ends[i]), static_cast<std::uint32_t>(ends[i + 1])});
  return of_all[1].toStringRef();
}

}  // namespace reef
