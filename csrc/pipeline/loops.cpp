#include <algorithm>

#include "pipeline/generators.h"

namespace reef {
namespace {

/// A chunk of a rank, by its number there, and a micro-batch.
struct Turn {
  std::uint32_t local = 0;
  std::uint32_t micro_batch = 0;
};

/// Micro-batches go round in groups of about as many as there are ranks. If they are not a multiple of that,
/// the groups are nearly equal and the larger come first: a smaller group at the end would leave ranks
/// waiting for each other.
std::vector<std::uint32_t> rounds(std::uint32_t ranks, std::uint32_t micro_batches) {
  const std::uint32_t number = std::max(1U, micro_batches / ranks);
  std::vector<std::uint32_t> sizes(number, micro_batches / number);
  for (std::uint32_t i = 0; i < micro_batches % number; ++i) ++sizes[i];
  return sizes;
}

std::vector<Turn> turns_forward(const PipelineShape& shape) {
  std::vector<Turn> turns;
  std::uint32_t first = 0;
  for (const std::uint32_t size : rounds(shape.ranks, shape.micro_batches)) {
    for (std::uint32_t local = 0; local < shape.chunks_per_rank; ++local) {
      for (std::uint32_t i = 0; i < size; ++i) turns.push_back({local, first + i});
    }
    first += size;
  }
  return turns;
}

std::vector<Turn> turns_backward(const PipelineShape& shape) {
  std::vector<Turn> turns = turns_forward(shape);
  for (Turn& turn : turns) turn.local = shape.chunks_per_rank - 1 - turn.local;
  return turns;
}

PipelineSchedule loop(const PipelineShape& shape) {
  return {"", shape.micro_batches, {loop_placement(shape.ranks, shape.chunks_per_rank)}, {}};
}

/// Gives how many turns a rank takes before its first backward pass besides those of `for_each_later_rank`.
std::size_t warm_up(const PipelineShape& shape, std::uint32_t rank, std::uint32_t for_each_later_rank) {
  const std::uint32_t group = rounds(shape.ranks, shape.micro_batches).front();
  const std::size_t turns = std::size_t{for_each_later_rank} * (shape.ranks - 1 - rank) +
                            std::size_t{shape.chunks_per_rank - 1} * group;
  return std::min(turns, std::size_t{shape.micro_batches} * shape.chunks_per_rank);
}

}  // namespace

std::vector<std::uint32_t> loop_placement(std::uint32_t ranks, std::uint32_t chunks_per_rank) {
  std::vector<std::uint32_t> placed(std::size_t{ranks} * chunks_per_rank);
  for (std::uint32_t chunk = 0; chunk < placed.size(); ++chunk) placed[chunk] = chunk % ranks;
  return placed;
}

PipelineSchedule interleaved(const PipelineShape& shape) {
  PipelineSchedule schedule = loop(shape);
  const std::vector<Turn> forward = turns_forward(shape), backward = turns_backward(shape);
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    PipelineActions actions;
    const auto chunk = [&](const Turn& turn) { return turn.local * shape.ranks + rank; };
    std::size_t next = 0;
    const auto forward_next = [&] {
      actions.forward(chunk(forward[next]), forward[next].micro_batch);
      ++next;
    };
    while (next < warm_up(shape, rank, 2)) forward_next();
    for (const Turn& turn : backward) {
      if (next < forward.size()) forward_next();
      actions.backward(chunk(turn), turn.micro_batch);
    }
    schedule.actions.push_back(actions.take());
  }
  return schedule;
}

PipelineSchedule interleaved_zero_bubble(const PipelineShape& shape) {
  PipelineSchedule schedule = loop(shape);
  const std::vector<Turn> forward = turns_forward(shape), backward = turns_backward(shape);
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    PipelineActions actions;
    const auto chunk = [&](const Turn& turn) { return turn.local * shape.ranks + rank; };
    std::size_t next = 0, weights = 0;
    const auto forward_next = [&] {
      actions.forward(chunk(forward[next]), forward[next].micro_batch);
      ++next;
    };
    const auto weight_next = [&] {
      actions.weight(chunk(backward[weights]), backward[weights].micro_batch);
      ++weights;
    };
    while (next < warm_up(shape, rank, 1)) forward_next();
    for (std::size_t done = 0; done < backward.size(); ++done) {
      if (next < forward.size()) forward_next();
      actions.input(chunk(backward[done]), backward[done].micro_batch);
      if (done + 1 - weights > rank) weight_next();
    }
    while (weights < backward.size()) weight_next();
    schedule.actions.push_back(actions.take());
  }
  return schedule;
}

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
