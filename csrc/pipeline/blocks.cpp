#include <algorithm>
#include <array>
#include <map>
#include <optional>

#include "pipeline/generators.h"
#include "pipeline/phases.h"
#include "reef/error.h"

namespace reef {
namespace {

using std::to_string;

/// Returns the phases of ZB-V for a rank, where F, I and W take the same time (2401.10241, section 6): the
/// pipeline is filled, runs in its steady state, and is drained. Stream 0 is of the rank's first chunk.
/// `micro_batches` must be at least 2 * ranks - 1.
std::vector<PipelinePhase> zbv_phases(std::uint32_t rank, std::uint32_t ranks, std::uint32_t micro_batches) {
  const std::uint32_t later = ranks - rank - 1;
  return {{2 * later + 1, "F0"},
          {rank, "F1 F0"},
          {later + 1, "F1 I1 W1"},
          {micro_batches - ranks - later, "F0 I0 W0 F1 I1 W1"},
          {later, "I0 W0 F1 I1 W1"},
          {rank, "I0 I1"},
          {later + 1, "I0 W0"},
          {rank, "W1"},
          {rank, "W0"}};
}

using Slots = std::map<std::uint64_t, PipelineAction>;

Slots slots_of(const PipelineBlock& block, std::uint32_t rank, std::uint32_t micro_batches,
               const std::string& name) {
  const auto ranks = static_cast<std::uint32_t>(block.slots.size());
  const std::uint32_t first = rank, second = 2 * ranks - 1 - rank;
  using Kind = PipelineAction::Kind;
  const std::array<PipelineAction, 4> in_block{{{Kind::kForward, first, 0},
                                                {Kind::kForward, second, 0},
                                                {Kind::kInput, second, 0},
                                                {Kind::kInput, first, 0}}};
  Slots taken;
  for (std::uint32_t m = 0; m < micro_batches; ++m) {
    for (std::size_t i = 0; i < in_block.size(); ++i) {
      PipelineAction action = in_block[i];
      action.micro_batch = m;
      const std::uint64_t slot = block.slots[rank][i] + std::uint64_t{block.period} * m;
      const auto [found, is_free] = taken.try_emplace(slot, action);
      if (!is_free)
        throw ConfigError("pipeline schedule '" + name + "': actions " + found->second.text() + " and " +
                          action.text() + " of rank " + to_string(rank) + " are in the same slot " +
                          to_string(slot) + "; give slots that differ modulo the period");
    }
  }
  return taken;
}

/// Offsets that repeat without a collision for any number of ranks (2405.15362, appendix).
PipelineBlock half_block(std::uint32_t ranks) {
  PipelineBlock block;
  const std::uint32_t gap = ranks % 2 == 0 ? 3 : 0;
  for (std::uint32_t i = 0; i < ranks; ++i)
    block.slots.push_back({2 * i, 3 * ranks - 2 - i, 3 * ranks + gap + 2 * i - 1, 6 * ranks + gap - 2 - i});
  return block;
}
PipelineBlock min_block(std::uint32_t ranks) {
  PipelineBlock block;
  const std::uint32_t gap = ranks % 3 == 0 ? 2 : 0;
  for (std::uint32_t i = 0; i < ranks; ++i)
    block.slots.push_back({i, 2 * ranks - 1 - i, 2 * ranks + gap + i, 4 * ranks + gap - 1 - i});
  return block;
}

}  // namespace

std::vector<std::uint32_t> v_placement(std::uint32_t ranks) {
  std::vector<std::uint32_t> placed(2 * std::size_t{ranks});
  for (std::uint32_t chunk = 0; chunk < placed.size(); ++chunk)
    placed[chunk] = chunk < ranks ? chunk : 2 * ranks - 1 - chunk;
  return placed;
}

PipelineSchedule pipeline_from_block(const PipelineBlock& block, std::uint32_t micro_batches,
                                     std::string name) {
  const auto ranks = static_cast<std::uint32_t>(block.slots.size());
  if (ranks == 0 || micro_batches == 0)
    throw ConfigError("pipeline schedule '" + name +
                      "': there is no rank, or no micro-batch; give at least one of each");
  PipelineSchedule schedule{std::move(name), micro_batches, {v_placement(ranks)}, {}};
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    const Slots slots = slots_of(block, rank, micro_batches, schedule.name);
    std::vector<PipelineAction> actions;
    std::vector<PipelineAction> inputs;
    std::size_t weights = 0;
    // A free slot takes the W that has waited longest.
    for (std::uint64_t slot = 0; slot <= slots.rbegin()->first || weights < inputs.size(); ++slot) {
      if (const auto found = slots.find(slot); found != slots.end()) {
        actions.push_back(found->second);
        if (found->second.kind == PipelineAction::Kind::kInput) inputs.push_back(found->second);
      } else if (weights < inputs.size()) {
        actions.push_back(inputs[weights++]);
        actions.back().kind = PipelineAction::Kind::kWeight;
      }
    }
    schedule.actions.push_back(std::move(actions));
  }
  check(schedule);
  return schedule;
}

PipelineSchedule zbv(const PipelineShape& shape) {
  PipelineSchedule schedule{"", shape.micro_batches, {v_placement(shape.ranks)}, {}};
  const std::uint32_t filled = std::max(2 * shape.ranks - 1, shape.micro_batches);
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    const auto pass_of = [&](std::uint32_t stream, std::uint32_t number) -> std::optional<PipelineTurn> {
      if (number >= shape.micro_batches) return std::nullopt;
      return PipelineTurn{stream == 0 ? rank : 2 * shape.ranks - 1 - rank, number};
    };
    schedule.actions.push_back(actions_of(zbv_phases(rank, shape.ranks, filled), pass_of));
  }
  return schedule;
}

PipelineSchedule v_half(const PipelineShape& shape) {
  return pipeline_from_block(half_block(shape.ranks), shape.micro_batches);
}

PipelineSchedule v_min(const PipelineShape& shape) {
  return pipeline_from_block(min_block(shape.ranks), shape.micro_batches);
}

}  // namespace reef
