#include <algorithm>
#include <utility>

#include "pipeline/generators.h"
#include "pipeline/phases.h"

namespace reef {
namespace {

/// Chunk c is on rank c for even micro-batches, and on rank S - 1 - c for odd ones.
std::vector<std::vector<std::uint32_t>> both_ways(std::uint32_t ranks) {
  std::vector<std::uint32_t> down = straight_placement(ranks), up = down;
  std::reverse(up.begin(), up.end());
  return {std::move(down), std::move(up)};
}

/// Returns the phases of DualPipe (deepseek-ai/DualPipe) for `rank` of `ranks` that a stream passes one way,
/// with `each` micro-batches in each stream.
std::vector<PipelinePhase> dualpipe_phases(std::uint32_t rank, std::uint32_t ranks, std::uint32_t each) {
  const std::uint32_t later = ranks - rank - 1, middle = (rank + 1) / 2, odd = rank % 2;
  return {{2 * later, "F0"},
          {rank + 1, "F0 F1"},
          {later, "I1 W* F1"},
          {each - 2 * ranks + rank + 1, "F0 B1 F1 B0"},
          {later, "B1 F1 B0"},
          {middle, "B1 B0"},
          {1 - odd, "B1 I0"},  // From here on, backward passes are split.
          {odd + rank - middle, "I1 I0"},
          {later, "W* I0"}};
}

}  // namespace

// Units of as many micro-batches as there are ranks; within one, with F and B of one slot each, the j-th of a
// direction runs chunk c forward in slot 2 j + c and backward in slot 2 j + 2 S - 1 - c (section 3.1).
PipelineSchedule chimera(const PipelineShape& shape) {
  const std::uint32_t ranks = shape.ranks;
  PipelineSchedule schedule{"", shape.micro_batches, both_ways(ranks), {}};
  using Slot = std::pair<std::uint64_t, PipelineAction>;
  std::vector<std::vector<Slot>> slots(ranks);
  for (std::uint32_t m = 0; m < shape.micro_batches; ++m) {
    const std::uint64_t begin = std::uint64_t{m / ranks} * 2 * ranks + 2 * (m % ranks / 2);
    for (std::uint32_t chunk = 0; chunk < ranks; ++chunk) {
      std::vector<Slot>& of_rank = slots[schedule.rank(chunk, m)];
      of_rank.push_back({begin + chunk, {PipelineAction::Kind::kForward, chunk, m}});
      of_rank.push_back({begin + 2 * ranks - 1 - chunk, {PipelineAction::Kind::kBackward, chunk, m}});
    }
  }
  for (std::vector<Slot>& of_rank : slots) {
    std::sort(of_rank.begin(), of_rank.end(), [](const Slot& a, const Slot& b) { return a.first < b.first; });
    std::vector<PipelineAction>& actions = schedule.actions.emplace_back();
    for (const auto& [slot, action] : of_rank) actions.push_back(action);
  }
  return schedule;
}

PipelineSchedule dualpipe(const PipelineShape& shape) {
  PipelineSchedule schedule{"", shape.micro_batches, both_ways(shape.ranks), {}};
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    const bool is_second_half = rank >= shape.ranks / 2;
    // Stream 0 of a rank is the direction in which it comes early.
    const auto pass_of = [&](std::uint32_t stream, std::uint32_t number) {
      const std::uint32_t direction = is_second_half ? 1 - stream : stream;
      return PipelineTurn{direction == 0 ? rank : shape.ranks - 1 - rank, 2 * number + direction};
    };
    const std::uint32_t from_its_end = std::min(rank, shape.ranks - 1 - rank);
    schedule.actions.push_back(
        actions_of(dualpipe_phases(from_its_end, shape.ranks / 2, shape.micro_batches / 2), pass_of));
  }
  return schedule;
}

PipelineSchedule dualpipev(const PipelineShape& shape) {
  PipelineSchedule schedule{"", shape.micro_batches, {v_placement(shape.ranks)}, {}};
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    const auto pass_of = [&](std::uint32_t stream, std::uint32_t number) {
      return PipelineTurn{stream == 0 ? rank : 2 * shape.ranks - 1 - rank, number};
    };
    schedule.actions.push_back(actions_of(dualpipe_phases(rank, shape.ranks, shape.micro_batches), pass_of));
  }
  return schedule;
}

}  // namespace reef
