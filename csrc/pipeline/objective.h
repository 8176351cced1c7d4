#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "reef/pipeline_partition.h"

namespace reef {

/// A chunk as an objective sees it.
struct PipelinePiece {
  double forward = 0, backward = 0;  ///< seconds of a micro-batch, on the slowest of its ranks
  double before = 0, behind = 0;     ///< seconds of the messages, one way
  double reduction = 0;              ///< seconds in which its ranks add up gradients
  std::uint32_t ranks = 1;

  double seconds() const { return forward + backward; }
};

/// What an objective knows of the first chunks.
struct PipelineValue {
  double sum = 0, most = 0;  ///< neither shrinks with another chunk
  double backward = 0;       ///< seconds of the chunks' backward passes and of their messages
  double end = 0;            ///< what the reduction of gradients adds
};

/// Adds a chunk behind others.
PipelineValue with(PipelineObjective objective, PipelineValue value, const PipelinePiece& piece,
                   std::uint32_t micro_batches);
/// Gives what first chunks and those behind them cost together, without the reduction of the latter.
PipelineValue joined(PipelineObjective objective, const PipelineValue& first, const PipelineValue& rest);
double seconds_of(PipelineObjective objective, const PipelineValue& value);

/// Prices runs of stages on places of a pipeline, where `rank_of[p]` is the rank at place p. A chunk has one
/// place or several that follow each other. Throws ConfigError for costs and ranks that do not fit. The
/// profile and the ranks must outlive it.
class PiecePrices {
 public:
  PiecePrices(const PipelineProfile& profile, std::span<const std::uint32_t> rank_of);

  std::uint32_t stages() const { return static_cast<std::uint32_t>(profile_.stages.size()); }
  std::uint32_t places() const { return static_cast<std::uint32_t>(rank_of_.size()); }

  /// Prices the chunk of the stages from `begin` to before `end` on `ranks` places from `place` on.
  PipelinePiece piece(std::uint32_t place, std::uint32_t ranks, std::uint32_t begin, std::uint32_t end) const;

 private:
  /// Gives the seconds of a message to a place from the one before, of which stage `cut` comes next.
  double message_seconds(std::uint32_t place, std::uint32_t cut) const;

  const PipelineProfile& profile_;
  std::span<const std::uint32_t> rank_of_;
  std::size_t all_ranks_;
  /// Of the stages before each one, and of all.
  std::vector<double> forward_until_, backward_until_;
  std::vector<std::uint64_t> gradient_bytes_until_;
};

}  // namespace reef
