#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reef/export.h"
#include "reef/pipeline_schedule.h"

namespace reef {

/// Pure data and pure code (no Torch): the schedules that the literature names, each made by a rule.

/// How many ranks, chunks and micro-batches a schedule is for, and how deep it is.
struct PipelineShape {
  std::uint32_t ranks = 1;
  std::uint32_t micro_batches = 1;
  /// The number of chunks that each rank has; 0 stands for the least that the schedule can have.
  std::uint32_t chunks_per_rank = 0;
  /// "1f1b", "zero_bubble" and what is asynchronous: for each hop from a chunk to the next, how many
  /// micro-batches more the ranks before it have in flight than those behind it, for each rank of the chunk
  /// before; empty stands for 1 everywhere, a single number holds for all hops. hops_for() gives those that
  /// hide slow links.
  std::vector<std::uint32_t> hops = {};
  /// What is asynchronous: the number of micro-batches of an update or a wave; 0 stands for the least that
  /// the rule allows.
  std::uint32_t micro_batches_per_update = 0;
  std::uint32_t staleness = 0;  ///< "hetpipe": see PipelineVersionRule
  /// "gpipe", "1f1b" and "zero_bubble": how many ranks each chunk has, together `ranks`. They take its
  /// micro-batches by turns (PipeDream's 1F1B-RR, 1806.03377, section 3.2), and add up its gradients. Chunk 0
  /// has the first ranks, and so on. Empty: each chunk has one.
  std::vector<std::uint32_t> ranks_per_chunk = {};
};

/// A row of the table of schedules.
struct PipelineGenerator {
  std::string_view name;
  std::string_view source;  ///< the paper
  std::string_view takes;   ///< which shapes, where not all: "an even number of ranks"
  bool synchronous = true;
  bool splits = false;  ///< its backward passes, into I and W
  PipelineSchedule (*generate)(const PipelineShape& shape);
};
REEF_API std::span<const PipelineGenerator> pipeline_generators();

/// Makes a schedule by its name in the table. Throws ConfigError, which lists the names or says which shapes
/// the schedule takes.
REEF_API PipelineSchedule pipeline_schedule(std::string_view name, const PipelineShape& shape);

/// Gives the least hops that hide messages which take so many seconds, for each hop, where each rank computes
/// for `forward_seconds` and `backward_seconds` a micro-batch: 1 + ceil(2 * message / (forward + backward)).
/// Where backward passes are split ("zero_bubble"), one more if the quotient is a whole number above 0.
/// Throws ConfigError for seconds that are negative, not finite or all 0.
REEF_API std::vector<std::uint32_t> hops_for(std::span<const double> message_seconds, double forward_seconds,
                                             double backward_seconds, bool splits);

/// A building block that is repeated for each micro-batch, `period` slots later each time (2405.15362,
/// section 3): in which slot each rank begins F of its first chunk, F of its second, I of its second and I of
/// its first. W fill the slots between. The chunks are placed in a V: rank r has chunks r and 2 * ranks - 1 -
/// r.
struct PipelineBlock {
  std::uint32_t period = 6;
  std::vector<std::array<std::uint32_t, 4>> slots;  ///< of each rank
};
/// Throws ConfigError if two actions of a rank meet in a slot, or ranks would wait for each other for ever.
REEF_API PipelineSchedule pipeline_from_block(const PipelineBlock& block, std::uint32_t micro_batches,
                                              std::string name = "block");

}  // namespace reef
