#include <algorithm>
#include <deque>
#include <optional>
#include <tuple>
#include <utility>

#include "pipeline/generators.h"
#include "pipeline/progress.h"
#include "pipeline/traffic.h"
#include "reef/error.h"
#include "reef/pipeline_simulation.h"

namespace reef {
namespace {

using Kind = PipelineAction::Kind;

/// Writes a schedule in virtual time: whichever rank can begin next does so. A rank prefers backward passes
/// to forward passes, and later chunks to earlier ones; a W runs when nothing else could begin at once.
class GreedyWriter {
 public:
  GreedyWriter(const PipelineCosts& costs, const PipelineSchedule& placed,
               const std::vector<std::uint32_t>& most, bool splits)
      : costs_(costs),
        placed_(placed),
        most_(most),
        splits_(splits),
        traffic_(costs_, placed_),
        ranks_(most.size()),
        next_forward_(placed.rank_of.size(), std::vector<std::uint32_t>(placed.chunks())),
        next_backward_(next_forward_) {
    for (std::uint32_t direction = 0; direction < placed.rank_of.size(); ++direction) {
      for (std::uint32_t chunk = 0; chunk < placed.chunks(); ++chunk)
        ranks_[placed.rank_of[direction][chunk]].chunks.push_back({direction, chunk});
    }
  }

  /// Gives the actions of each rank; nothing if what ranks may have in flight does not suffice.
  std::optional<std::vector<std::vector<PipelineAction>>> write() {
    while (const auto next = earliest()) run(*next);
    std::vector<std::vector<PipelineAction>> actions;
    std::size_t done = 0;
    for (Rank& rank : ranks_) {
      done += rank.actions.size();
      actions.push_back(std::move(rank.actions));
    }
    const std::size_t each = splits_ ? 3 : 2;
    if (done != each * placed_.chunks() * placed_.micro_batches) return std::nullopt;
    return actions;
  }

 private:
  struct Rank {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> chunks;  ///< with their directions
    std::vector<PipelineAction> actions;
    std::deque<PipelineAction> waiting;  ///< W
    double free_seconds = 0;
    std::uint32_t in_flight = 0;
  };
  struct Next {
    double begin_seconds;
    std::uint32_t rank;
    PipelineAction action;
  };

  std::uint32_t directions() const { return static_cast<std::uint32_t>(placed_.rank_of.size()); }

  /// A forward pass leaves room for one of each later chunk of its rank, without which it could not be gone
  /// back.
  bool has_room(const Rank& rank, std::uint32_t number, std::uint32_t chunk) const {
    std::uint32_t later = 0;
    for (const auto& [direction, other] : rank.chunks) later += other > chunk ? 1 : 0;
    return directions() > 1 ? rank.in_flight < most_[number] : rank.in_flight + 1 + later <= most_[number];
  }

  bool has_gradient(std::uint32_t direction, std::uint32_t chunk, std::uint32_t turn) const {
    return chunk + 1 == placed_.chunks() || next_backward_[direction][chunk + 1] > turn;
  }

  /// Gives the passes that a rank could run next.
  std::vector<Next> passes(std::uint32_t number) const {
    const Rank& rank = ranks_[number];
    std::vector<Next> all;
    const auto offer = [&](Kind kind, std::uint32_t chunk, std::uint32_t micro_batch) {
      const PipelineAction action{kind, chunk, micro_batch};
      all.push_back({std::max(rank.free_seconds, traffic_.ready_seconds(action)), number, action});
    };
    for (const auto& [direction, chunk] : rank.chunks) {
      const std::uint32_t forward = next_forward_[direction][chunk],
                          backward = next_backward_[direction][chunk];
      const auto micro_batch = [&, d = direction](std::uint32_t turn) { return turn * directions() + d; };
      if (backward < forward && has_gradient(direction, chunk, backward))
        offer(splits_ ? Kind::kInput : Kind::kBackward, chunk, micro_batch(backward));
      if (micro_batch(forward) < placed_.micro_batches && has_room(rank, number, chunk) &&
          (chunk == 0 || next_forward_[direction][chunk - 1] > forward))
        offer(Kind::kForward, chunk, micro_batch(forward));
    }
    return all;
  }

  std::optional<Next> next_of(std::uint32_t number) const {
    const Rank& rank = ranks_[number];
    const std::vector<Next> all = passes(number);
    const auto order = [&](const Next& next) {
      return std::tuple(next.begin_seconds, next.action.kind == Kind::kForward,
                        placed_.chunks() - next.action.chunk, next.action.micro_batch);
    };
    const auto best = std::min_element(all.begin(), all.end(),
                                       [&](const Next& a, const Next& b) { return order(a) < order(b); });
    const bool could_begin = best != all.end() && best->begin_seconds <= rank.free_seconds;
    if (!rank.waiting.empty() && !could_begin) return Next{rank.free_seconds, number, rank.waiting.front()};
    if (best == all.end()) return std::nullopt;
    return *best;
  }

  std::optional<Next> earliest() const {
    std::optional<Next> first;
    for (std::uint32_t number = 0; number < ranks_.size(); ++number) {
      const std::optional<Next> next = next_of(number);
      if (next && (!first || next->begin_seconds < first->begin_seconds)) first = next;
    }
    return first;
  }

  void run(const Next& next) {
    Rank& rank = ranks_[next.rank];
    const auto [kind, chunk, micro_batch] = next.action;
    rank.free_seconds = next.begin_seconds + action_seconds(costs_, next.action, next.rank);
    rank.actions.push_back(next.action);
    traffic_.made(next.action, rank.free_seconds);
    const std::uint32_t direction = micro_batch % directions();
    if (kind == Kind::kForward) {
      ++rank.in_flight;
      ++next_forward_[direction][chunk];
    } else if (kind == Kind::kWeight) {
      --rank.in_flight;
      rank.waiting.pop_front();
    } else {
      ++next_backward_[direction][chunk];
      if (kind == Kind::kInput) rank.waiting.push_back({Kind::kWeight, chunk, micro_batch});
      if (kind == Kind::kBackward) --rank.in_flight;
    }
  }

  const PipelineCosts& costs_;
  const PipelineSchedule& placed_;
  const std::vector<std::uint32_t>& most_;
  bool splits_;
  PipelineTraffic traffic_;
  std::vector<Rank> ranks_;
  std::vector<std::vector<std::uint32_t>> next_forward_, next_backward_;  ///< by direction and chunk
};

}  // namespace

PipelineSchedule greedy_pipeline(const PipelineCosts& costs, std::vector<std::vector<std::uint32_t>> rank_of,
                                 std::uint32_t micro_batches,
                                 const std::vector<std::uint32_t>& most_in_flight, bool splits) {
  PipelineSchedule schedule{"greedy", micro_batches, std::move(rank_of), {}};
  schedule.actions.resize(most_in_flight.size());
  check_placement(schedule);
  check_costs(costs, schedule);
  auto actions = GreedyWriter(costs, schedule, most_in_flight, splits).write();
  if (!actions)
    throw ConfigError(
        "pipeline schedule 'greedy': ranks would wait for each other for ever with so few passes in "
        "flight; give each rank at least one for each of its chunks");
  schedule.actions = std::move(*actions);
  return schedule;
}

PipelineSchedule greedy(const PipelineShape& shape) {
  const std::uint32_t chunks = shape.ranks * shape.chunks_per_rank;
  PipelineCosts costs;
  costs.chunks.assign(chunks, {1, 1, 1});
  return greedy_pipeline(costs,
                         {shape.chunks_per_rank == 2 ? v_placement(shape.ranks)
                                                     : loop_placement(shape.ranks, shape.chunks_per_rank)},
                         shape.micro_batches, std::vector<std::uint32_t>(shape.ranks, chunks), true);
}

}  // namespace reef
