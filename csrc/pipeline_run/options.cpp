#include "pipeline_run/options.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/bytes_over_ranks.h"
#include "distributed/members.h"
#include "distributed/message_route.h"
#include "pipeline/progress.h"
#include "reef/error.h"
#include "reef/pipeline_generator.h"
#include "reef/pipeline_versions.h"
#include "shard/agreement.h"

namespace reef {
namespace {

using Kind = PipelineAction::Kind;

/// Of a call of train(), whose actions are all listed before it begins.
constexpr std::uint64_t kMostMicroBatches = 10'000'000;

PipelineSchedule named_schedule(const PipelineOptions& options, std::uint32_t ranks, std::uint32_t batches) {
  return pipeline_schedule(options.schedule.empty() ? "1f1b" : options.schedule,
                           {.ranks = ranks,
                            .micro_batches = options.micro_batches * batches,
                            .chunks_per_rank = options.chunks_per_rank,
                            .hops = options.hops,
                            .micro_batches_per_update = options.micro_batches,
                            .staleness = options.staleness,
                            .ranks_per_chunk = options.ranks_per_chunk});
}

/// The first batches by "1f1b", each with its update; then it is asynchronous.
PipelineSchedule beginning_with_1f1b(const PipelineOptions& options, std::uint32_t ranks,
                                     std::uint32_t synchronous, std::uint32_t batches) {
  PipelineOptions flushing = options;
  flushing.schedule = "1f1b";
  PipelineSchedule all =
      with_updates(repeated(named_schedule(flushing, ranks, 1), synchronous), options.micro_batches);
  all.name = options.schedule;
  all.versions = named_schedule(options, ranks, 1).versions;
  if (synchronous < batches) append(named_schedule(options, ranks, batches - synchronous), all);
  return all;
}

PipelineSchedule given_schedule(const PipelineOptions& options, std::uint32_t ranks) {
  if (!options.actions) return named_schedule(options, ranks, 1);
  check(*options.actions);
  return *options.actions;
}

/// Throws ConfigError unless the executor can run the schedule.
void check_runnable(const PipelineSchedule& schedule, std::uint32_t ranks) {
  const auto refuse = [&](const std::string& why) {
    throw ConfigError("reef::Pipeline: schedule '" + schedule.name + "' " + why);
  };
  if (schedule.ranks() != ranks)
    refuse("is for " + std::to_string(schedule.ranks()) + " ranks, and the group has " +
           std::to_string(ranks) + ".");
  const bool updates = schedule.versions.kind != PipelineVersionRule::Kind::kFlush;
  if (updates) pipeline_versions(schedule);
  // Gradients are added up by B, or by I and W.
  for (const auto& actions : schedule.actions) {
    std::map<std::pair<std::uint32_t, bool>, std::uint32_t> least;  // of a chunk, and of W alone
    for (const auto& [kind, chunk, micro_batch] : actions) {
      if (kind == Kind::kForward) continue;
      if (kind == Kind::kUpdate) {
        if (!updates) refuse("updates weights, and has no rule which version of them a pass uses: give one.");
        continue;
      }
      for (const bool of_weights : {false, true}) {
        if (kind == (of_weights ? Kind::kInput : Kind::kWeight)) continue;
        std::uint32_t& expected = least[{chunk, of_weights}];
        if (micro_batch < std::exchange(expected, micro_batch + 1))
          refuse("runs backward for micro-batch " + std::to_string(micro_batch) + " on chunk " +
                 std::to_string(chunk) +
                 " behind a later one, so that gradients would not have the bits of one process: let it "
                 "take them in their order.");
      }
    }
    if (!updates || actions.empty()) continue;
    std::map<std::uint32_t, std::uint32_t> without_update;  // the last micro-batch of each chunk
    for (const auto& [kind, chunk, micro_batch] : actions) {
      if (makes_weight_gradients(kind)) without_update[chunk] = micro_batch;
      if (kind != Kind::kUpdate) continue;
      const auto last = without_update.find(chunk);
      if (last == without_update.end() || last->second != micro_batch)
        refuse("updates chunk " + std::to_string(chunk) + " for micro-batch " + std::to_string(micro_batch) +
               ", which is not the one whose gradients it has made last: let it follow them.");
      without_update.erase(last);
    }
    for (const auto& [chunk, micro_batch] : without_update)
      refuse("does not update chunk " + std::to_string(chunk) + " after micro-batch " +
             std::to_string(micro_batch) + ", so that its gradients would be lost: add an update.");
  }
}

void check_shard(const ShardOptions& shard) {
  const auto refuse = [](const std::string& what) {
    throw ConfigError("reef::Pipeline was given shard." + what);
  };
  if (shard.reduction != Reduction::kMean)
    refuse("reduction kSum, and how gradients are added up is the pipeline's reduction: give it there.");
  if (!shard.ignored.empty())
    refuse("ignored parameters, which nobody would train: freeze them, or leave them out of it.");
  if (shard.compression != Compression::kNone)
    refuse(std::string("compression ") + name_of(shard.compression) +
           ", and gradients of pipelines are not compressed: leave it out.");
}

PipelineCuts even_cuts(std::size_t stages, std::uint32_t chunks) {
  PipelineCuts cuts;
  for (std::uint32_t chunk = 1; chunk < chunks; ++chunk)
    cuts.push_back(
        static_cast<std::uint32_t>(stages / chunks * chunk + std::min<std::size_t>(chunk, stages % chunks)));
  return cuts;
}

std::string runs_text(const RecomputedRuns& runs) {
  std::string text;
  for (const RecomputedRun& run : runs)
    text += ", recomputed " + std::to_string(run.first) + " to before " + std::to_string(run.end);
  return text;
}

}  // namespace

void check_group(const ProcessGroupPtr& group) {
  if (!group)
    throw ConfigError("reef::Pipeline was given no process group: make one with reef::init_process_group.");
  if (group->getSize() > 1) MessageRoute::to("reef::Pipeline", group->getRank() == 0 ? 1 : 0, group);
}

void check_options(const PipelineOptions& options, std::uint32_t ranks) {
  if (options.staleness > 0 && options.schedule != "hetpipe")
    throw ConfigError(
        "reef::Pipeline was given a staleness, which is of schedule \"hetpipe\": leave it out with '" +
        options.schedule + "'.");
  const bool follows_newest = options.schedule == "pipemare";
  if (options.synchronous_batches > 0 && !follows_newest && options.schedule != "pipedream" &&
      options.schedule != "pipedream_vertical")
    throw ConfigError(
        "reef::Pipeline was given synchronous_batches, which begin \"pipedream\", "
        "\"pipedream_vertical\" and \"pipemare\": leave them out with schedule '" +
        options.schedule + "'.");
  if (!(options.correction_decay >= 0 && options.correction_decay < 1) ||
      (options.correction_decay > 0 && !follows_newest))
    throw ConfigError(
        "reef::Pipeline: correction_decay is from 0 to less than 1, and above 0 with schedule "
        "\"pipemare\" only.");
  if (options.replicas == 0 || ranks % options.replicas != 0)
    throw ConfigError("reef::Pipeline: " + std::to_string(options.replicas) + " replicas cannot share " +
                      std::to_string(ranks) + " ranks alike: give a number that divides that.");
  if (!options.replica_cuts.empty() &&
      (options.replica_cuts.size() != options.replicas || !options.cuts.empty()))
    throw ConfigError("reef::Pipeline was given cuts of " + std::to_string(options.replica_cuts.size()) +
                      " replicas and has " + std::to_string(options.replicas) +
                      ": give those of each, and no other cuts.");
  check_shard(options.shard);
  if (options.recompute && !options.recomputed.empty())
    throw ConfigError(
        "reef::Pipeline was given recompute, which is of all stages, and runs of stages that are recomputed: "
        "leave out the one or the other.");
  if (!options.sample) return;
  if (options.chunks_per_rank != 0 || !options.hops.empty() || !options.ranks_per_chunk.empty() ||
      options.actions || !options.cuts.empty() || !options.replica_cuts.empty() ||
      !options.recomputed.empty())
    throw ConfigError(
        "reef::Pipeline was given a sample, for which schedule and cuts are planned, and chunks_per_rank, "
        "hops, ranks_per_chunk, actions, cuts, replica_cuts or recomputed: leave out the one or the others.");
  if (options.sample->micro_batch.empty())
    throw ConfigError("reef::Pipeline was given a sample of no tensors: give those of a micro-batch.");
}

PipelineSchedule schedule_of(const PipelineOptions& options, std::uint32_t ranks) {
  PipelineSchedule schedule = given_schedule(options, ranks);
  check_runnable(schedule, ranks);
  return schedule;
}

std::uint32_t micro_batches_of_batch(const PipelineSchedule& of_a_batch) {
  const bool flushes = of_a_batch.versions.kind == PipelineVersionRule::Kind::kFlush;
  return flushes ? of_a_batch.micro_batches : of_a_batch.versions.micro_batches_per_update;
}

void check_batches(std::uint32_t batches, std::uint32_t micro_batches_of_batch) {
  if (batches == 0) throw ConfigError("reef::Pipeline::train was given no batches: give one at least.");
  if (std::uint64_t{batches} * micro_batches_of_batch > kMostMicroBatches)
    throw ConfigError("reef::Pipeline::train was given " + std::to_string(batches) + " batches of " +
                      std::to_string(micro_batches_of_batch) + " micro-batches, and a call takes " +
                      std::to_string(kMostMicroBatches) + " micro-batches at most: make several calls.");
}

PipelineSchedule training_schedule(const PipelineOptions& options, const PipelineSchedule& of_a_batch,
                                   std::uint32_t batches, std::uint64_t before) {
  const auto refuse = [](const std::string& why) { throw ConfigError("reef::Pipeline::train " + why); };
  check_batches(batches, micro_batches_of_batch(of_a_batch));
  if (of_a_batch.rank_of.size() > 1)
    refuse("runs schedules of several directions, as '" + of_a_batch.name + "' is, step by step.");
  const bool flushes = of_a_batch.versions.kind == PipelineVersionRule::Kind::kFlush;
  // An update waits for all ranks that share its stages. Only in the table's schedules is it certain that
  // they all reach it without an update that comes behind it.
  if (!flushes && options.actions && !options.replica_cuts.empty())
    refuse(
        "runs an asynchronous schedule of your own for replicas that are cut alike: take one of the table, "
        "or cut them alike.");
  if (flushes) {
    PipelineSchedule schedule = with_updates(repeated(of_a_batch, batches), of_a_batch.micro_batches);
    schedule.versions = {PipelineVersionRule::Kind::kVertical, of_a_batch.micro_batches, 0};
    return schedule;
  }
  if (!options.actions) {
    const std::uint64_t synchronous =
        options.synchronous_batches - std::min<std::uint64_t>(before, options.synchronous_batches);
    if (synchronous == 0) return named_schedule(options, of_a_batch.ranks(), batches);
    return beginning_with_1f1b(options, of_a_batch.ranks(),
                               static_cast<std::uint32_t>(std::min<std::uint64_t>(synchronous, batches)),
                               batches);
  }
  const std::uint32_t micro_batches = batches * micro_batches_of_batch(of_a_batch);
  if (micro_batches % of_a_batch.micro_batches != 0)
    refuse("cannot divide " + std::to_string(micro_batches) + " micro-batches into runs of '" +
           of_a_batch.name + "', which has " + std::to_string(of_a_batch.micro_batches) +
           ": give a number of batches that can be divided.");
  return repeated(of_a_batch, micro_batches / of_a_batch.micro_batches);
}

std::vector<PipelineCuts> cuts_of_replicas(const PipelineOptions& options, std::size_t stages,
                                           std::uint32_t chunks) {
  if (stages < chunks)
    throw ConfigError("reef::Pipeline: " + std::to_string(stages) + " stages cannot be cut into " +
                      std::to_string(chunks) + " chunks.");
  std::vector<PipelineCuts> all = options.replica_cuts;
  if (all.empty())
    all.assign(options.replicas, options.cuts.empty() ? even_cuts(stages, chunks) : options.cuts);
  for (const PipelineCuts& cuts : all) {
    bool is_legal = cuts.size() + 1 == chunks;
    for (std::size_t i = 0; i < cuts.size(); ++i)
      is_legal = is_legal && cuts[i] > (i == 0 ? 0 : cuts[i - 1]) && cuts[i] < stages;
    if (!is_legal)
      throw ConfigError("reef::Pipeline: cuts are the first stages of each chunk but the first, ascending: " +
                        std::to_string(chunks - 1) + " numbers from 1 to " + std::to_string(stages - 1) +
                        ".");
  }
  return all;
}

std::string facts_of(const PipelineOptions& options) {
  std::ostringstream text;
  text << "micro_batches " << options.micro_batches << ", replicas " << options.replicas << ", seed "
       << options.seed << ", reduction " << (options.reduction == Reduction::kMean ? "mean" : "sum")
       << (options.recompute ? ", recompute" : "") << runs_text(options.recomputed)
       << ", synchronous_batches " << options.synchronous_batches << ", correction_decay "
       << options.correction_decay << ", staleness " << options.staleness
       << "\nshard: " << options_text(options.shard);
  for (const std::vector<std::string>& names : options.tied) {
    text << "\ntied";
    for (const std::string& name : names) text << " " << name;
  }
  text << "\nschedule " << options.schedule << "\n";
  if (!options.sample) return text.str() + "no sample";
  text << "a sample of " << options.sample->micro_batch.size() << " tensors, state_bytes_per_byte "
       << options.sample->state_bytes_per_byte << (options.sample->may_replicate ? ", may_replicate" : "");
  return text.str();
}

std::string facts_of(const PipelineSchedule& schedule, const std::vector<PipelineCuts>& cuts,
                     std::size_t stages) {
  std::ostringstream text;
  text << stages << " stages";
  for (const PipelineCuts& of_replica : cuts) {
    text << ", cut before";
    for (const std::uint32_t cut : of_replica) text << " " << cut;
  }
  text << "\nschedule " << schedule.name << " of " << schedule.micro_batches << " micro-batches\n"
       << schedule.text();
  return text.str();
}

void agree_on_pipeline(const ProcessGroupPtr& group, const std::string& wrong, const std::string& facts) {
  note_call(*group, "reef::Pipeline");
  const std::vector<std::string> all =
      gather_texts(wrong.empty() ? "+" + facts : "-" + wrong, group, c10::kCPU);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].front() == '-')
      throw ConfigError("rank " + std::to_string(rank) + ": " + all[rank].substr(1));
  }
  const std::vector<std::string> first = lines_of(all.front().substr(1));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    const std::vector<std::string> other = lines_of(all[rank].substr(1));
    const auto [mine, its] = std::mismatch(first.begin(), first.end(), other.begin(), other.end());
    if (mine == first.end() && its == other.end()) continue;
    throw ConfigError("reef::Pipeline was given different options: on rank 0 " +
                      (mine == first.end() ? "nothing more" : *mine) + ", on rank " + std::to_string(rank) +
                      " " + (its == other.end() ? "nothing more" : *its) + "; give the same on every rank.");
  }
}

}  // namespace reef
