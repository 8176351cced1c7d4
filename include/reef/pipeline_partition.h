#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "reef/export.h"
#include "reef/link.h"
#include "reef/pipeline_simulation.h"

namespace reef {

/// Pure data and pure code (no Torch): where to cut a chain of stages into the chunks of a pipeline.

/// A chain, and the ranks that it is cut for.
struct PipelineProfile {
  std::vector<PipelineChunkCost> stages;  ///< of each stage of the chain, as if it were a chunk
  std::vector<double> speeds = {};        ///< as in PipelineCosts
  std::vector<Link> links = {};           ///< as in PipelineCosts
  std::vector<std::uint64_t> rank_bytes =
      {};  ///< what each rank may hold at most; empty stands for any number
  /// What stages give to others besides their outputs: with the numbers of stages in place of chunks.
  std::vector<PipelineSkip> skips = {};
};

/// The first stage of each chunk but the first: ascending, from 1.
using PipelineCuts = std::vector<std::uint32_t>;

/// Consecutive stages of which a rank keeps only what enters the first, and which it runs once more before
/// their backward pass. A cut ends a run.
struct RecomputedRun {
  std::uint32_t first = 0;  ///< stage
  std::uint32_t end = 0;    ///< the stage behind the last

  friend bool operator==(const RecomputedRun&, const RecomputedRun&) = default;
};
/// Runs in ascending order, which do not overlap.
using RecomputedRuns = std::vector<RecomputedRun>;
/// Returns one run for each chunk, which has all of its stages.
REEF_API RecomputedRuns whole_chunks(std::uint32_t stages, const PipelineCuts& cuts);

/// Adds up the stages of each chunk: seconds, and what is kept and fixed; of outputs the last one's counts,
/// and of working bytes the most. The first chunk makes no gradient of an input, so its I takes no time and
/// W is its whole backward pass. The time of recomputing is part of I (of W in the first chunk). A recomputed
/// run keeps only what enters it; what the largest run keeps during its backward pass is part of the working
/// bytes. A skip is between the chunks of its stages. Throws ConfigError for cuts and runs that are not
/// ascending or not within the chain, and for skips that are not from a stage to later ones.
REEF_API PipelineCosts cut_costs(const PipelineProfile& profile, const PipelineCuts& cuts,
                                 const RecomputedRuns& recomputed = {});

/// By what cuts are compared; skips do not count. T are the seconds of a chunk for a micro-batch, forward and
/// backward, on its rank; C those of a message to the next chunk's rank; M is the number of micro-batches.
enum class PipelineObjective : std::uint8_t {
  kPipeDream,  ///< the slowest chunk or link: max(T, 2 C) (1806.03377, section 3.2)
  kDapple,     ///< up to a pivot chunk and back, with its M - 1 repetitions (2007.01045, section 4.2)
  kPipeTorch,  ///< the slowest chunk with its messages, which do not overlap: max(T + 2 C before + 2 C
               ///< behind)
  kSumAndMax,  ///< sum(T + 2 C) + (M - 1) max(T) (Alpa, 2201.12023, section 5.2)
};
inline constexpr PipelineObjective kPipelineObjectives[] = {
    PipelineObjective::kPipeDream, PipelineObjective::kDapple, PipelineObjective::kPipeTorch,
    PipelineObjective::kSumAndMax};
REEF_API std::string_view name(PipelineObjective objective);

/// Gives the value of an objective, in seconds, where chunk c is on rank rank_of[c].
REEF_API double objective_seconds(PipelineObjective objective, const PipelineProfile& profile,
                                  const PipelineCuts& cuts, std::span<const std::uint32_t> rank_of,
                                  std::uint32_t micro_batches);

/// Finds the `count` cuts of least value, or all if there are fewer, in ascending order of it: a best-first
/// search, exact unless it meets more than 30,000 parts of cuts at once, from where on it follows only the
/// most promising. Throws ConfigError if the chain has fewer stages than there are chunks, and for costs and
/// ranks that do not fit.
REEF_API std::vector<PipelineCuts> best_cuts(PipelineObjective objective, const PipelineProfile& profile,
                                             std::span<const std::uint32_t> rank_of,
                                             std::uint32_t micro_batches, std::size_t count);

}  // namespace reef
