#include <algorithm>
#include <numeric>

#include "pipeline/generators.h"

namespace reef {
namespace {

std::uint32_t chunks_of(const PipelineShape& shape) {
  return static_cast<std::uint32_t>(shape.hops.size()) + 1;
}
std::uint32_t ranks_of(const PipelineShape& shape, std::uint32_t chunk) {
  return shape.ranks_per_chunk.empty() ? 1 : shape.ranks_per_chunk[chunk];
}

/// Adds up by how many micro-batches each hop makes the pipeline deeper, from the one behind `begin` to the
/// one before `end`.
std::uint32_t depth_between(const PipelineShape& shape, std::uint32_t begin, std::uint32_t end) {
  std::uint32_t depth = 0;
  for (std::uint32_t chunk = begin; chunk < end; ++chunk) depth += shape.hops[chunk] * ranks_of(shape, chunk);
  return depth;
}

/// Places chunks on ranks one after another. There is a direction for each combination of ranks that a
/// micro-batch can meet, or for each micro-batch, if these do not divide by their number.
std::vector<std::vector<std::uint32_t>> by_turns(const PipelineShape& shape) {
  std::uint64_t directions = 1;
  for (const std::uint32_t ranks : shape.ranks_per_chunk)
    directions = std::min<std::uint64_t>(std::lcm(directions, std::uint64_t{ranks}), shape.micro_batches);
  if (shape.micro_batches % directions != 0) directions = shape.micro_batches;
  std::vector<std::vector<std::uint32_t>> rank_of(directions);
  for (std::uint32_t direction = 0; direction < directions; ++direction) {
    for (std::uint32_t chunk = 0, first = 0; chunk < chunks_of(shape); first += ranks_of(shape, chunk++))
      rank_of[direction].push_back(first + direction % ranks_of(shape, chunk));
  }
  return rank_of;
}

/// What a rank of a chunk does: how many micro-batches are in flight before its first backward pass, and, if
/// backward passes are split, how many W stay behind.
struct Order {
  std::uint32_t depth = 1;
  std::optional<std::size_t> lag = {};
};

/// Lets each rank take its micro-batches in order.
template <class OrderOf>
PipelineSchedule straight(const PipelineShape& shape, const OrderOf& order_of) {
  PipelineSchedule schedule{"", shape.micro_batches, by_turns(shape), {}};
  for (std::uint32_t chunk = 0; chunk < chunks_of(shape); ++chunk) {
    const auto [depth, lag] = order_of(chunk);
    for (std::uint32_t own = 0; own < ranks_of(shape, chunk); ++own) {
      std::vector<PipelineTurn> turns;
      for (std::uint32_t m = own; m < shape.micro_batches; m += ranks_of(shape, chunk))
        turns.push_back({chunk, m});
      schedule.actions.push_back(in_turn(turns, turns, std::min<std::size_t>(depth, turns.size()) - 1, lag));
    }
  }
  return schedule;
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

std::uint32_t depth_of(const PipelineShape& shape, std::uint32_t chunk) {
  const std::uint32_t last = chunks_of(shape) - 1;
  const std::uint32_t of_all = ranks_of(shape, last) + depth_between(shape, chunk, last);
  return (of_all + ranks_of(shape, chunk) - 1) / ranks_of(shape, chunk);
}

PipelineSchedule gpipe(const PipelineShape& shape) {
  return straight(shape, [&](std::uint32_t) { return Order{shape.micro_batches}; });
}

PipelineSchedule one_f_one_b(const PipelineShape& shape) {
  return straight(shape, [&](std::uint32_t chunk) { return Order{depth_of(shape, chunk)}; });
}

// A rank has as many tapes as rank 0: what its depth leaves of them waits for W. So hops of 1 are ZB-H1, hops
// of 2 are ZB-H2, and longer ones hide slower links.
PipelineSchedule zero_bubble(const PipelineShape& shape) {
  return straight(shape, [&](std::uint32_t chunk) {
    return Order{depth_of(shape, chunk), depth_between(shape, 0, chunk) / ranks_of(shape, chunk)};
  });
}

}  // namespace reef
