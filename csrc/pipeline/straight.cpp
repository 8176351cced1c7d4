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

/// `depth` micro-batches in flight before the first backward pass; then one forward and one backward in turn.
std::vector<PipelineAction> forwards_and_backwards(std::uint32_t rank, std::uint32_t micro_batches,
                                                   std::uint32_t depth) {
  PipelineActions actions;
  std::uint32_t forward = 0, backward = 0;
  while (forward < std::min(depth, micro_batches)) actions.forward(rank, forward++);
  while (backward < micro_batches) {
    actions.backward(rank, backward++);
    if (forward < micro_batches) actions.forward(rank, forward++);
  }
  return actions.take();
}

}  // namespace

std::vector<std::uint32_t> straight_placement(std::uint32_t ranks) { return loop_placement(ranks, 1); }

std::uint32_t depth_of(const PipelineShape& shape, std::uint32_t rank) {
  return 1 + sum(shape.hops.begin() + rank, shape.hops.end());
}

PipelineSchedule gpipe(const PipelineShape& shape) {
  PipelineSchedule schedule = straight(shape);
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank)
    schedule.actions.push_back(forwards_and_backwards(rank, shape.micro_batches, shape.micro_batches));
  return schedule;
}

PipelineSchedule one_f_one_b(const PipelineShape& shape) {
  PipelineSchedule schedule = straight(shape);
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank)
    schedule.actions.push_back(forwards_and_backwards(rank, shape.micro_batches, depth_of(shape, rank)));
  return schedule;
}

// Rank s has as many tapes as rank 0: what its depth leaves of them waits for W. So hops of 1 are ZB-H1, hops
// of 2 are ZB-H2, and longer ones hide slower links.
PipelineSchedule zero_bubble(const PipelineShape& shape) {
  PipelineSchedule schedule = straight(shape);
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    const std::uint32_t depth = std::min(depth_of(shape, rank), shape.micro_batches);
    const std::uint32_t lag = sum(shape.hops.begin(), shape.hops.begin() + rank);
    PipelineActions actions;
    std::uint32_t forward = 0, input = 0, weight = 0;
    while (forward + 1 < depth) actions.forward(rank, forward++);
    while (input < shape.micro_batches) {
      if (forward < shape.micro_batches) actions.forward(rank, forward++);
      actions.input(rank, input++);
      if (input - weight > lag) actions.weight(rank, weight++);
    }
    while (weight < shape.micro_batches) actions.weight(rank, weight++);
    schedule.actions.push_back(actions.take());
  }
  return schedule;
}

}  // namespace reef
