#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "reef/pipeline_generator.h"

namespace reef {

/// Writes the actions of one rank, one after another.
class PipelineActions {
 public:
  void forward(std::uint32_t chunk, std::uint32_t micro_batch) { add(Kind::kForward, chunk, micro_batch); }
  void backward(std::uint32_t chunk, std::uint32_t micro_batch) { add(Kind::kBackward, chunk, micro_batch); }
  void input(std::uint32_t chunk, std::uint32_t micro_batch) { add(Kind::kInput, chunk, micro_batch); }
  void weight(std::uint32_t chunk, std::uint32_t micro_batch) { add(Kind::kWeight, chunk, micro_batch); }
  std::vector<PipelineAction> take() { return std::move(actions_); }

 private:
  using Kind = PipelineAction::Kind;
  void add(Kind kind, std::uint32_t chunk, std::uint32_t micro_batch) {
    actions_.push_back({kind, chunk, micro_batch});
  }
  std::vector<PipelineAction> actions_;
};

/// A chunk and a micro-batch whose pass is run next.
struct PipelineTurn {
  std::uint32_t chunk = 0;
  std::uint32_t micro_batch = 0;
};
/// Runs `warm_up` of a rank's forward passes, then a forward pass and a backward pass in turn, then the
/// backward passes that are left. With `lag`, backward passes are split, and so many W stay behind I.
std::vector<PipelineAction> in_turn(const std::vector<PipelineTurn>& forward,
                                    const std::vector<PipelineTurn>& backward, std::size_t warm_up,
                                    std::optional<std::size_t> lag = std::nullopt);

/// Places chunk c on rank c.
std::vector<std::uint32_t> straight_placement(std::uint32_t ranks);
/// Places chunk c on rank c modulo `ranks`.
std::vector<std::uint32_t> loop_placement(std::uint32_t ranks, std::uint32_t chunks_per_rank);
/// Places chunks r and 2 * ranks - 1 - r on rank r.
std::vector<std::uint32_t> v_placement(std::uint32_t ranks);

// Each family in its own file.
PipelineSchedule gpipe(const PipelineShape& shape);
PipelineSchedule one_f_one_b(const PipelineShape& shape);
PipelineSchedule zero_bubble(const PipelineShape& shape);
PipelineSchedule interleaved(const PipelineShape& shape);
PipelineSchedule interleaved_zero_bubble(const PipelineShape& shape);
PipelineSchedule breadth_first(const PipelineShape& shape);
PipelineSchedule zbv(const PipelineShape& shape);
PipelineSchedule v_half(const PipelineShape& shape);
PipelineSchedule v_min(const PipelineShape& shape);
PipelineSchedule chimera(const PipelineShape& shape);
PipelineSchedule dualpipe(const PipelineShape& shape);
PipelineSchedule dualpipev(const PipelineShape& shape);
PipelineSchedule greedy(const PipelineShape& shape);
PipelineSchedule pipedream(const PipelineShape& shape);
PipelineSchedule pipedream_vertical(const PipelineShape& shape);
PipelineSchedule pipedream_2bw(const PipelineShape& shape);
PipelineSchedule pipemare(const PipelineShape& shape);
PipelineSchedule hetpipe(const PipelineShape& shape);

/// Whether pipeline_schedule() takes a shape for the schedule of this name, whose numbers of ranks, chunks
/// and micro-batches are given.
bool takes(std::string_view name, const PipelineShape& shape);
bool takes_ranks_per_chunk(std::string_view name);

/// Gives how many micro-batches a rank of chunk `chunk` has in flight, where each rank has one chunk: 1 + the
/// sum of the hops behind it, if all chunks have one rank.
std::uint32_t depth_of(const PipelineShape& shape, std::uint32_t chunk);

}  // namespace reef
