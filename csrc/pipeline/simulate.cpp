#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "pipeline/progress.h"
#include "pipeline/traffic.h"
#include "reef/pipeline_simulation.h"
#include "reef/pipeline_versions.h"

namespace reef {
namespace {

using Kind = PipelineAction::Kind;

/// Adds up a rank's memory over its actions and messages.
class RankMemory {
 public:
  RankMemory(const PipelineCosts& costs, PipelineTraffic& traffic, std::uint32_t rank)
      : costs_(costs), traffic_(traffic), changes_(traffic.changes(rank)) {}

  void hold(std::uint64_t bytes) { add(bytes); }

  void run(const PipelineAction& action, double begin_seconds, double end_seconds) {
    const PipelineChunkCost& cost = costs_.chunks[action.chunk];
    const std::uint64_t needed = traffic_.needed_bytes(action), made = traffic_.made_bytes(action);
    // I frees what only it has needed, and keeps the gradients with which W begins.
    const std::uint64_t in_both = std::min(cost.kept_bytes, cost.kept_after_input_bytes);
    const std::uint64_t at_input = cost.kept_bytes - in_both;
    const std::uint64_t from_input = cost.kept_after_input_bytes - in_both;
    pass(begin_seconds);
    arrive_at(begin_seconds);
    switch (action.kind) {
      case Kind::kForward:
        take(needed);  // which is part of what is kept from now on
        return during(end_seconds, cost.kept_bytes + made + cost.working_bytes, cost.working_bytes);
      case Kind::kBackward:
        return during(end_seconds, made + cost.working_bytes, cost.working_bytes + cost.kept_bytes + needed);
      case Kind::kInput:
        return during(end_seconds, made + from_input + cost.working_bytes,
                      cost.working_bytes + at_input + needed);
      case Kind::kWeight:
        return during(end_seconds, cost.working_bytes, cost.working_bytes + cost.kept_after_input_bytes);
      case Kind::kUpdate:
        return;
    }
  }

  std::uint64_t peak_bytes() {
    pass(std::numeric_limits<double>::infinity());
    return static_cast<std::uint64_t>(peak_);
  }

 private:
  void during(double end_seconds, std::uint64_t before, std::uint64_t after) {
    add(before);
    pass(end_seconds);
    take(after);
  }
  /// Applies what messages have changed before that time.
  void pass(double seconds) {
    for (; next_ < changes_.size() && changes_[next_].seconds < seconds; ++next_) {
      alive_ += changes_[next_].bytes;
      peak_ = std::max(peak_, alive_);
    }
  }
  /// Applies what they change at that time, when an action begins that may use it.
  void arrive_at(double seconds) {
    for (; next_ < changes_.size() && changes_[next_].seconds == seconds; ++next_)
      alive_ += changes_[next_].bytes;
  }
  void add(std::uint64_t bytes) {
    alive_ += static_cast<std::int64_t>(bytes);
    peak_ = std::max(peak_, alive_);
  }
  void take(std::uint64_t bytes) { alive_ -= static_cast<std::int64_t>(bytes); }

  const PipelineCosts& costs_;
  const PipelineTraffic& traffic_;
  std::vector<MemoryChange> changes_;
  std::size_t next_ = 0;
  std::int64_t alive_ = 0, peak_ = 0;
};

/// Of each chunk, the most versions of its weights that are there at once.
std::vector<std::uint32_t> versions_of(const PipelineCosts& costs, const PipelineSchedule& schedule) {
  const bool have_bytes =
      std::any_of(costs.chunks.begin(), costs.chunks.end(),
                  [](const PipelineChunkCost& chunk) { return chunk.gradient_bytes > 0; });
  if (schedule.versions.kind == PipelineVersionRule::Kind::kFlush || !have_bytes)
    return std::vector<std::uint32_t>(schedule.chunks(), 1);
  return pipeline_versions(schedule).most_alive;
}

/// `versions`: of versions_of().
std::uint64_t peak_bytes(const PipelineCosts& costs, const PipelineSchedule& schedule, std::uint32_t rank,
                         const PipelineCost& cost, const std::vector<std::uint32_t>& versions,
                         PipelineTraffic& traffic) {
  RankMemory memory(costs, traffic, rank);
  memory.hold(traffic.ahead_bytes(rank));
  for (std::uint32_t chunk = 0; chunk < schedule.chunks(); ++chunk) {
    const std::set<std::uint32_t> ranks = ranks_of_chunk(schedule, chunk);
    if (!ranks.contains(rank)) continue;
    memory.hold(costs.chunks[chunk].fixed_bytes);
    const std::uint64_t more = (ranks.size() > 1 ? 1 : 0) + versions[chunk] - 1;
    memory.hold(more * costs.chunks[chunk].gradient_bytes);
  }
  for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i)
    memory.run(schedule.actions[rank][i], cost.begin_seconds[rank][i], cost.end_seconds[rank][i]);
  return memory.peak_bytes();
}

/// Gives the seconds of the rank that is busy the longest with adding up gradients.
double reduction_seconds(const PipelineCosts& costs, const PipelineSchedule& schedule) {
  if (schedule.rank_of.size() == 1) return 0;
  const bool trains = std::any_of(
      schedule.actions.begin(), schedule.actions.end(), [](const std::vector<PipelineAction>& actions) {
        return std::any_of(actions.begin(), actions.end(),
                           [](const PipelineAction& each) { return makes_weight_gradients(each.kind); });
      });
  std::vector<double> of_rank(schedule.ranks());
  for (std::uint32_t chunk = 0; trains && chunk < schedule.chunks(); ++chunk) {
    const std::set<std::uint32_t> of_chunk = ranks_of_chunk(schedule, chunk);
    const std::vector<std::uint32_t> ranks(of_chunk.begin(), of_chunk.end());
    for (const std::uint32_t rank : ranks)
      of_rank[rank] +=
          reduction_seconds(costs.links, schedule.ranks(), ranks, rank, costs.chunks[chunk].gradient_bytes);
  }
  return of_rank.empty() ? 0 : *std::max_element(of_rank.begin(), of_rank.end());
}

}  // namespace

double PipelineCost::idle_share() const {
  double busy = 0;
  for (const PipelineRankCost& rank : ranks) busy += rank.busy_seconds;
  const double all = makespan_seconds * static_cast<double>(ranks.size());
  return all > 0 ? 1 - busy / all : 0;
}

PipelineCost simulate(const PipelineCosts& costs, const PipelineSchedule& schedule) {
  check_actions(schedule);
  check_costs(costs, schedule);
  PipelineCost cost;
  cost.ranks.resize(schedule.ranks());
  cost.begin_seconds.resize(schedule.ranks());
  cost.end_seconds.resize(schedule.ranks());
  PipelineTraffic traffic(costs, schedule);
  visit_as_ranks_run(schedule, [&](std::uint32_t rank, std::size_t index) {
    const PipelineAction& action = schedule.actions[rank][index];
    const double seconds = action_seconds(costs, action, rank);
    const double begin = std::max(cost.ranks[rank].end_seconds, traffic.ready_seconds(action));
    cost.begin_seconds[rank].push_back(begin);
    cost.end_seconds[rank].push_back(begin + seconds);
    cost.ranks[rank].end_seconds = begin + seconds;
    cost.ranks[rank].busy_seconds += seconds;
    traffic.made(action, begin + seconds);
  });
  const std::vector<std::uint32_t> versions = versions_of(costs, schedule);
  cost.messages = traffic.messages();
  cost.message_bytes = traffic.message_bytes();
  for (std::uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
    PipelineRankCost& of = cost.ranks[rank];
    cost.makespan_seconds = std::max(cost.makespan_seconds, of.end_seconds);
    if (schedule.actions[rank].empty()) continue;
    of.begin_seconds = cost.begin_seconds[rank].front();
    of.most_in_flight = most_in_flight(schedule.actions[rank]);
    of.peak_bytes = peak_bytes(costs, schedule, rank, cost, versions, traffic);
  }
  cost.reduction_seconds = reduction_seconds(costs, schedule);
  cost.makespan_seconds += cost.reduction_seconds;
  return cost;
}

double pipeline_period_seconds(const PipelineCosts& costs, const PipelineSchedule& schedule) {
  const PipelineCost four = simulate(costs, repeated(schedule, 4)),
                     three = simulate(costs, repeated(schedule, 3));
  return four.makespan_seconds - three.makespan_seconds + four.reduction_seconds;
}

}  // namespace reef
