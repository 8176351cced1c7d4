#include <algorithm>
#include <numeric>

#include "pipeline/generators.h"

namespace reef {
namespace {

std::uint32_t sum(std::vector<std::uint32_t>::const_iterator begin,
                  std::vector<std::uint32_t>::const_iterator end) {
  return std::accumulate(begin, end, 0U);
}

PipelineSchedule straight(const PipelineShape& shape) {
  return {"", shape.micro_batches, {straight_placement(shape.ranks)}, {}};
}

/// Runs micro-batches in order, with `depth` of them in flight before the first backward pass.
std::vector<PipelineAction> in_order(const PipelineShape& shape, std::uint32_t rank, std::uint32_t depth,
                                     std::optional<std::size_t> lag = std::nullopt) {
  std::vector<PipelineTurn> turns;
  for (std::uint32_t m = 0; m < shape.micro_batches; ++m) turns.push_back({rank, m});
  return in_turn(turns, turns, std::min(depth, shape.micro_batches) - 1, lag);
}

}  // namespace

std::vector<PipelineAction> in_turn(const std::vector<PipelineTurn>& forward,
                                    const std::vector<PipelineTurn>& backward, std::size_t warm_up,
                                    std::optional<std::size_t> lag) {
  PipelineActions actions;
  std::size_t forwards = 0, weights = 0;
  const auto run_forward = [&] {
    actions.forward(forward[forwards].chunk, forward[forwards].micro_batch);
    ++forwards;
  };
  const auto run_weight = [&] {
    actions.weight(backward[weights].chunk, backward[weights].micro_batch);
    ++weights;
  };
  while (forwards < std::min(warm_up, forward.size())) run_forward();
  for (std::size_t done = 0; done < backward.size(); ++done) {
    const auto [chunk, micro_batch] = backward[done];
    if (forwards < forward.size()) run_forward();
    if (!lag) {
      actions.backward(chunk, micro_batch);
      continue;
    }
    actions.input(chunk, micro_batch);
    if (done + 1 - weights > *lag) run_weight();
  }
  while (lag && weights < backward.size()) run_weight();
  return actions.take();
}

std::vector<std::uint32_t> straight_placement(std::uint32_t ranks) { return loop_placement(ranks, 1); }

std::uint32_t depth_of(const PipelineShape& shape, std::uint32_t rank) {
  return 1 + sum(shape.hops.begin() + rank, shape.hops.end());
}

PipelineSchedule gpipe(const PipelineShape& shape) {
  PipelineSchedule schedule = straight(shape);
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank)
    schedule.actions.push_back(in_order(shape, rank, shape.micro_batches));
  return schedule;
}

PipelineSchedule one_f_one_b(const PipelineShape& shape) {
  PipelineSchedule schedule = straight(shape);
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank)
    schedule.actions.push_back(in_order(shape, rank, depth_of(shape, rank)));
  return schedule;
}

// Rank s has as many tapes as rank 0: what its depth leaves of them waits for W. So hops of 1 are ZB-H1, hops
// of 2 are ZB-H2, and longer ones hide slower links.
PipelineSchedule zero_bubble(const PipelineShape& shape) {
  PipelineSchedule schedule = straight(shape);
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    const std::uint32_t lag = sum(shape.hops.begin(), shape.hops.begin() + rank);
    schedule.actions.push_back(in_order(shape, rank, depth_of(shape, rank), lag));
  }
  return schedule;
}

}  // namespace reef
