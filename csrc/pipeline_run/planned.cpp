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
namespace {

/// The number of copies of its trained weights that a rank holds besides what a plan knows: its own sums of
/// gradients, what waves and corrections keep.
std::uint64_t copies_besides(const PipelineOptions& options) {
  std::uint64_t copies = options.correction_decay > 0 ? 2 : 0;
  if (options.replicas == 1) return copies;
  const bool has_waves = options.schedule == "hetpipe";
  return copies + (has_waves ? 2 + (std::uint64_t{options.staleness} + 1) * options.replicas : 1);
}

}  // namespace

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
  std::vector<std::int64_t> cuts, hops, recomputed;  // of runs the first stage and the end, one after another
  Together together(group, c10::kCPU);
  together.here([&] {
    if (!first) return;
    const SurroundingsScope generators_are_kept{Surroundings({})};  // makers may use random numbers
    PipelineProfile profile = measure_pipeline(stages, sample.micro_batch, first,
                                               {.state_bytes_per_byte = sample.state_bytes_per_byte / divisor,
                                                .rank_bytes = sample.rank_bytes,
                                                .loss = sample.loss});
    for (PipelineChunkCost& stage : profile.stages)
      stage.fixed_bytes += copies_besides(options) * stage.gradient_bytes;
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
    hops.assign(plan.hops.begin(), plan.hops.end());
  });
  const c10::IValue told = together.broadcast(
      [&] { return c10::IValue(std::make_tuple(schedule, text, cuts, hops, recomputed)); });
  const auto& of_all = told.toTupleRef().elements();
  const auto numbers_at = [&](std::size_t place) {
    const std::vector<std::int64_t> numbers = of_all[place].toIntVector();
    return std::vector<std::uint32_t>(numbers.begin(), numbers.end());
  };
  PipelineSchedule actions = pipeline_schedule_from_json(of_all[0].toStringRef());
  if (actions.versions.kind == PipelineVersionRule::Kind::kFlush) {
    options.actions = std::move(actions);
  } else {  // each call of train() makes one for its batches
    options.hops = numbers_at(3);
  }
  options.cuts = numbers_at(2);
  options.recompute = false;
  const std::vector<std::uint32_t> ends = numbers_at(4);
  for (std::size_t i = 0; i + 1 < ends.size(); i += 2) options.recomputed.push_back({ends[i], ends[i + 1]});
  return of_all[1].toStringRef();
}

}  // namespace reef
