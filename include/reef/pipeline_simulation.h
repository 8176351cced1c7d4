#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reef/export.h"
#include "reef/link.h"
#include "reef/pipeline_schedule.h"

namespace reef {

/// Pure data and pure code (no Torch): what a pipeline costs, in seconds and bytes.

/// What one chunk costs for one micro-batch, on a rank of speed 1.
struct PipelineChunkCost {
  double forward_seconds = 0;
  double input_seconds = 0;   ///< of I
  double weight_seconds = 0;  ///< of W; a whole backward pass takes both
  /// Of the output, which is sent to the next chunk's rank; the gradient that comes back has as many.
  std::uint64_t output_bytes = 0;
  std::uint64_t kept_bytes = 0;              ///< from F to B or I
  std::uint64_t kept_after_input_bytes = 0;  ///< from I to W
  std::uint64_t working_bytes = 0;           ///< what a pass needs besides while it runs
  std::uint64_t fixed_bytes = 0;             ///< parameters, gradients and states of optimizers: there always
  /// Of its weights that are trained, and of their gradients, which ranks that have the same chunk add up
  /// behind the last action. Such a rank holds them once more than fixed_bytes says: its own sums are apart
  /// from those of all ranks. By an asynchronous schedule it holds as many for each version of the weights
  /// but the newest.
  std::uint64_t gradient_bytes = 0;
};

struct PipelineCosts {
  std::vector<PipelineChunkCost> chunks;
  /// How much faster each rank is than one of speed 1: its seconds are divided by this. Empty stands for 1.
  std::vector<double> speeds = {};
  /// The link from rank a to rank b is element a * ranks + b. Each is a queue: a message occupies it for
  /// message_seconds plus bytes over bytes_per_second, and arrives latency_seconds later. A single one holds
  /// for all pairs; empty stands for links that take no time.
  std::vector<Link> links = {};
  /// What chunks give to others besides their outputs. Its bytes are held, and sent, for each chunk that
  /// takes it.
  std::vector<PipelineSkip> skips = {};
};

struct PipelineRankCost {
  double busy_seconds = 0;
  double begin_seconds = 0;          ///< of its first action
  double end_seconds = 0;            ///< of its last one
  std::uint32_t most_in_flight = 0;  ///< pairs of chunk and micro-batch between F and B or W, at most
  /// With messages that have not been sent yet, or not been used, and memory that is ready for those that
  /// come next: two from each other rank, if a message has at most 16 MiB.
  std::uint64_t peak_bytes = 0;
};

struct PipelineCost {
  double makespan_seconds = 0;   ///< from the first begin to the last end, and the reduction behind it
  double reduction_seconds = 0;  ///< in which ranks that have the same chunk add up its gradients
  std::vector<PipelineRankCost> ranks;
  std::uint64_t messages = 0;
  std::uint64_t message_bytes = 0;
  /// Of each action of each rank.
  std::vector<std::vector<double>> begin_seconds, end_seconds;

  /// Gives the share of the makespan in which ranks do not compute.
  REEF_API double idle_share() const;
};

/// Runs a schedule in virtual time. Updates take none. Gradients of a chunk that n ranks have are added up
/// when all ranks have ended: each of them sends a part, one in n, to each of the others, and what these add
/// up comes back. Throws ConfigError for what check() throws, for costs of another number of chunks, ranks or
/// links, and for numbers that are negative or not finite.
REEF_API PipelineCost simulate(const PipelineCosts& costs, const PipelineSchedule& schedule);

/// Gives the seconds of a batch where ranks go on to the next one without a barrier: the fourth of four in a
/// row.
REEF_API double pipeline_period_seconds(const PipelineCosts& costs, const PipelineSchedule& schedule);

/// Writes a schedule in virtual time: whichever rank can begin first does so, with a backward pass rather
/// than a forward pass, and with a W where nothing else could begin at once. `rank_of` is
/// PipelineSchedule::rank_of; a rank has at most `most_in_flight` of its passes between F and B or W at once.
/// Throws ConfigError as simulate() does, and if so few do not suffice.
REEF_API PipelineSchedule greedy_pipeline(const PipelineCosts& costs,
                                          std::vector<std::vector<std::uint32_t>> rank_of,
                                          std::uint32_t micro_batches,
                                          const std::vector<std::uint32_t>& most_in_flight, bool splits);

/// Draws a self-contained SVG: time to the right, a row for each rank, and in it its actions by kind and
/// micro-batch. Where a rank has several chunks, later ones are darker.
REEF_API std::string pipeline_chart(const PipelineCosts& costs, const PipelineSchedule& schedule,
                                    const std::string& title = "Pipeline");

}  // namespace reef
