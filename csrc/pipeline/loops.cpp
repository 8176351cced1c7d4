#include <algorithm>

#include "pipeline/generators.h"

namespace reef {
namespace {

/// Micro-batches go round in groups of about as many as there are ranks. If they are not a multiple of that,
/// the groups are nearly equal and the larger come first: a smaller group at the end would leave ranks
/// waiting for each other.
std::vector<std::uint32_t> rounds(std::uint32_t ranks, std::uint32_t micro_batches) {
  const std::uint32_t number = std::max(1U, micro_batches / ranks);
  std::vector<std::uint32_t> sizes(number, micro_batches / number);
  for (std::uint32_t i = 0; i < micro_batches % number; ++i) ++sizes[i];
  return sizes;
}

enum class Way : std::uint8_t { kForward, kBackward };

/// In each round, a rank's chunks one after another (backward: from the last one), each for all micro-batches
/// of the round.
std::vector<PipelineTurn> turns(const PipelineShape& shape, std::uint32_t rank, Way way) {
  std::vector<PipelineTurn> all;
  std::uint32_t first = 0;
  for (const std::uint32_t size : rounds(shape.ranks, shape.micro_batches)) {
    for (std::uint32_t i = 0; i < shape.chunks_per_rank; ++i) {
      const std::uint32_t local = way == Way::kForward ? i : shape.chunks_per_rank - 1 - i;
      for (std::uint32_t m = first; m < first + size; ++m) all.push_back({local * shape.ranks + rank, m});
    }
    first += size;
  }
  return all;
}

PipelineSchedule loop(const PipelineShape& shape) {
  return {"", shape.micro_batches, {loop_placement(shape.ranks, shape.chunks_per_rank)}, {}};
}

/// A rank begins with its forward passes of all chunks but the last for a round, and with
/// `for_each_later_rank` more for each rank behind it.
PipelineSchedule loop_in_turn(const PipelineShape& shape, std::uint32_t for_each_later_rank, bool splits) {
  PipelineSchedule schedule = loop(shape);
  const std::uint32_t round = rounds(shape.ranks, shape.micro_batches).front();
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    const std::size_t warm_up = std::size_t{for_each_later_rank} * (shape.ranks - 1 - rank) +
                                std::size_t{shape.chunks_per_rank - 1} * round;
    std::optional<std::size_t> lag;
    if (splits) lag = rank;
    schedule.actions.push_back(
        in_turn(turns(shape, rank, Way::kForward), turns(shape, rank, Way::kBackward), warm_up, lag));
  }
  return schedule;
}

}  // namespace

std::vector<std::uint32_t> loop_placement(std::uint32_t ranks, std::uint32_t chunks_per_rank) {
  std::vector<std::uint32_t> placed(std::size_t{ranks} * chunks_per_rank);
  for (std::uint32_t chunk = 0; chunk < placed.size(); ++chunk) placed[chunk] = chunk % ranks;
  return placed;
}

PipelineSchedule interleaved(const PipelineShape& shape) { return loop_in_turn(shape, 2, false); }

PipelineSchedule interleaved_zero_bubble(const PipelineShape& shape) { return loop_in_turn(shape, 1, true); }

PipelineSchedule breadth_first(const PipelineShape& shape) {
  PipelineSchedule schedule = loop(shape);
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    PipelineActions actions;
    for (std::uint32_t local = 0; local < shape.chunks_per_rank; ++local) {
      for (std::uint32_t m = 0; m < shape.micro_batches; ++m) actions.forward(local * shape.ranks + rank, m);
    }
    for (std::uint32_t local = shape.chunks_per_rank; local-- > 0;) {
      for (std::uint32_t m = 0; m < shape.micro_batches; ++m) actions.backward(local * shape.ranks + rank, m);
    }
    schedule.actions.push_back(actions.take());
  }
  return schedule;
}

}  // namespace reef
