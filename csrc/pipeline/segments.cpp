#include "pipeline/segments.h"

#include <algorithm>
#include <map>
#include <set>

#include "pipeline/parcels.h"
#include "pipeline/progress.h"

namespace reef {

std::vector<std::int64_t> ranks_of_stage(const PipelineSchedule& schedule,
                                         const std::vector<PipelineCuts>& cuts, std::uint32_t stage) {
  const auto replicas = static_cast<std::uint32_t>(cuts.size());
  std::vector<std::int64_t> ranks;
  for (std::uint32_t replica = 0; replica < replicas; ++replica) {
    for (const std::uint32_t rank : ranks_of_chunk(schedule, chunk_of(stage, cuts[replica])))
      ranks.push_back(rank_in_group(rank, replica, replicas));
  }
  return ranks;
}

std::vector<PipelineSegment> pipeline_segments(const PipelineSchedule& schedule,
                                               const std::vector<PipelineCuts>& cuts, std::uint32_t stages) {
  std::vector<PipelineSegment> segments;
  for (std::uint32_t stage = 0; stage < stages; ++stage) {
    const std::vector<std::int64_t> ranks = ranks_of_stage(schedule, cuts, stage);
    auto of_ranks = std::find_if(segments.begin(), segments.end(),
                                 [&](const PipelineSegment& segment) { return segment.ranks == ranks; });
    if (of_ranks == segments.end()) of_ranks = segments.insert(of_ranks, {{}, ranks});
    of_ranks->stages.push_back(stage);
  }
  return segments;
}

namespace {

/// Whether each rank has one chunk, which is the same in all directions in which it has any.
bool has_one_chunk_on_each_rank(const PipelineSchedule& schedule) {
  std::map<std::uint32_t, std::set<std::uint32_t>> chunks;  // of each rank
  for (const std::vector<std::uint32_t>& rank_of : schedule.rank_of) {
    for (std::uint32_t chunk = 0; chunk < rank_of.size(); ++chunk) chunks[rank_of[chunk]].insert(chunk);
  }
  return std::all_of(chunks.begin(), chunks.end(), [](const auto& each) { return each.second.size() == 1; });
}

}  // namespace

PipelineSchedule serving_schedule(const PipelineSchedule& schedule) {
  PipelineSchedule serving = schedule;
  if (schedule.rank_of.size() == 1) {
    for (std::vector<PipelineAction>& actions : serving.actions)
      std::erase_if(actions, [](const auto& each) { return each.kind != PipelineAction::Kind::kForward; });
    return serving;
  }
  if (has_one_chunk_on_each_rank(schedule)) {
    for (std::vector<std::uint32_t>& rank_of : serving.rank_of)
      rank_of.back() = schedule.rank_of.front().back();
  } else {
    serving.rank_of.resize(1);
  }
  for (std::vector<PipelineAction>& actions : serving.actions) actions.clear();
  for (std::uint32_t micro_batch = 0; micro_batch < schedule.micro_batches; ++micro_batch) {
    for (std::uint32_t chunk = 0; chunk < schedule.chunks(); ++chunk)
      serving.actions[serving.rank(chunk, micro_batch)].push_back(
          {PipelineAction::Kind::kForward, chunk, micro_batch});
  }
  return serving;
}

}  // namespace reef
