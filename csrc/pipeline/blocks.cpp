#include <algorithm>
#include <array>
#include <map>

#include "pipeline/generators.h"
#include "reef/error.h"

namespace reef {
namespace {

using std::to_string;

/// Counts a rank's actions of the V placement by kind and chunk, so that each takes the next micro-batch.
class VWriter {
 public:
  VWriter(std::uint32_t first, std::uint32_t second, std::uint32_t micro_batches)
      : chunk_{first, second}, micro_batches_(micro_batches) {}

  enum Chunk : std::uint8_t { kFirst, kSecond };
  std::uint32_t forwards(Chunk chunk) const { return forward_[chunk]; }
  std::uint32_t inputs(Chunk chunk) const { return input_[chunk]; }
  std::uint32_t weights(Chunk chunk) const { return weight_[chunk]; }

  void forward(Chunk chunk) {
    const std::uint32_t m = forward_[chunk]++;
    if (m < micro_batches_) actions_.forward(chunk_[chunk], m);
  }
  void input(Chunk chunk) {
    const std::uint32_t m = input_[chunk]++;
    if (m < micro_batches_) actions_.input(chunk_[chunk], m);
  }
  void weight(Chunk chunk) {
    const std::uint32_t m = weight_[chunk]++;
    if (m < micro_batches_) actions_.weight(chunk_[chunk], m);
  }
  std::vector<PipelineAction> take() { return actions_.take(); }

 private:
  PipelineActions actions_;
  std::array<std::uint32_t, 2> chunk_;
  std::array<std::uint32_t, 2> forward_{}, input_{}, weight_{};
  std::uint32_t micro_batches_;
};

/// The phases of ZB-V for a rank, where F, I and W take the same time: filled up, in turn, and emptied.
std::vector<PipelineAction> zbv_actions(std::uint32_t rank, std::uint32_t ranks,
                                        std::uint32_t micro_batches) {
  // The phases are made for so many micro-batches; with fewer, what is of others is left out.
  const std::uint32_t filled = std::max(2 * ranks - 1, micro_batches);
  VWriter write(rank, 2 * ranks - 1 - rank, micro_batches);
  constexpr auto kFirst = VWriter::kFirst, kSecond = VWriter::kSecond;
  const auto whole_second = [&] {
    write.forward(kSecond);
    write.input(kSecond);
    write.weight(kSecond);
  };
  for (std::uint32_t i = 0; i < 2 * (ranks - rank) - 1; ++i) write.forward(kFirst);
  for (std::uint32_t i = 0; i < rank; ++i) {
    write.forward(kSecond);
    write.forward(kFirst);
  }
  for (std::uint32_t i = 0; i < ranks - rank; ++i) whole_second();
  while (write.forwards(kSecond) < write.forwards(kFirst) || write.forwards(kFirst) < filled) {
    if (write.forwards(kFirst) < filled) write.forward(kFirst);
    write.input(kFirst);
    write.weight(kFirst);
    whole_second();
  }
  for (std::uint32_t i = 0; i < rank; ++i) {
    write.input(kFirst);
    write.input(kSecond);
  }
  for (std::uint32_t i = 0; i < ranks - rank; ++i) {
    write.input(kFirst);
    write.weight(kFirst);
  }
  while (write.weights(kSecond) < write.inputs(kSecond)) write.weight(kSecond);
  while (write.weights(kFirst) < write.inputs(kFirst)) write.weight(kFirst);
  return write.take();
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
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank)
    schedule.actions.push_back(zbv_actions(rank, shape.ranks, shape.micro_batches));
  return schedule;
}

PipelineSchedule v_half(const PipelineShape& shape) {
  return pipeline_from_block(half_block(shape.ranks), shape.micro_batches);
}

PipelineSchedule v_min(const PipelineShape& shape) {
  return pipeline_from_block(min_block(shape.ranks), shape.micro_batches);
}

}  // namespace reef
