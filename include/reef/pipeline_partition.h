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
/// Runs in ascending order, of which one may lie within another: it follows that one, and is recomputed once
/// more when that one is recomputed. Else they do not overlap.
using RecomputedRuns = std::vector<RecomputedRun>;
/// Returns one run for each chunk, which has all of its stages.
REEF_API RecomputedRuns whole_chunks(std::uint32_t stages, const PipelineCuts& cuts);

/// Adds up the stages of each chunk: seconds, and what is kept and fixed; of outputs the last one's counts,
/// and of working bytes the most. The first chunk makes no gradient of an input, so its I takes no time and
/// W is its whole backward pass. The time of recomputing is part of I (of W in the first chunk). A recomputed
/// run keeps only what enters it; what the largest run keeps during its backward pass, with what the runs
/// within it keep during theirs, is part of the working bytes. A skip is between the chunks of its stages.
/// Throws ConfigError for cuts and runs that are not ascending or not within the chain, and for skips that
/// are not from a stage to later ones.
REEF_API PipelineCosts cut_costs(const PipelineProfile& profile, const PipelineCuts& cuts,
                                 const RecomputedRuns& recomputed = {});

/// By what divisions are compared; skips do not count. T are the seconds of a chunk for a micro-batch,
/// forward and backward, on the slowest of its n ranks, and R those in which these add up its gradients, once
/// for a batch; C are those of a message from its last rank to the first of the next chunk; M is the number
/// of micro-batches.
enum class PipelineObjective : std::uint8_t {
  kPipeDream,  ///< the slowest chunk or link: max(T / n, R / M, 2 C) (1806.03377, section 3.2)
  /// Up to a pivot chunk and back, with its M - 1 repetitions, each of T / n; and of the reductions what does
  /// not end while chunks before still run backward (2007.01045, section 4.2).
  kDapple,
  /// The slowest chunk with its messages, which do not overlap: max((T + 2 C before + 2 C behind) / n)
  /// (Pipe-torch, IEEE 8916305, which has one rank for each chunk).
  kPipeTorch,
  /// sum(T + 2 C) + max((M / n - 1) T) + max(R), with M / n rounded up (Alpa, 2201.12023, section 5.2, where
  /// n is 1).
  kSumAndMax,
};
inline constexpr PipelineObjective kPipelineObjectives[] = {
    PipelineObjective::kPipeDream, PipelineObjective::kDapple, PipelineObjective::kPipeTorch,
    PipelineObjective::kSumAndMax};
REEF_API std::string_view name(PipelineObjective objective);

/// Where a chain is cut, and how many ranks take each chunk's micro-batches by turns (see
/// PipelineShape::ranks_per_chunk).
struct PipelineDivision {
  PipelineCuts cuts;
  std::vector<std::uint32_t> ranks_per_chunk;
  double seconds = 0;  ///< the value of the objective by which it was found
};

/// Gives the value of an objective, in seconds, where chunk c is on rank rank_of[c].
REEF_API double objective_seconds(PipelineObjective objective, const PipelineProfile& profile,
                                  const PipelineCuts& cuts, std::span<const std::uint32_t> rank_of,
                                  std::uint32_t micro_batches);
/// The same where chunk 0 has the first ranks of `order`, and so on. Throws ConfigError if they are not as
/// many as the chunks have together.
REEF_API double objective_seconds(PipelineObjective objective, const PipelineProfile& profile,
                                  const PipelineDivision& division, std::span<const std::uint32_t> order,
                                  std::uint32_t micro_batches);

/// Finds the `count` cuts of least value, or all if there are fewer, in ascending order of it: a best-first
/// search, exact unless it meets more than 30,000 parts of cuts at once, from where on it follows only the
/// most promising. Throws ConfigError if the chain has fewer stages than there are chunks, and for costs and
/// ranks that do not fit.
REEF_API std::vector<PipelineCuts> best_cuts(PipelineObjective objective, const PipelineProfile& profile,
                                             std::span<const std::uint32_t> rank_of,
                                             std::uint32_t micro_batches, std::size_t count);

/// The same of all divisions, of any number of chunks, over these ranks in this order. No chunk has more
/// ranks than there are micro-batches.
REEF_API std::vector<PipelineDivision> best_divisions(PipelineObjective objective,
                                                      const PipelineProfile& profile,
                                                      std::span<const std::uint32_t> order,
                                                      std::uint32_t micro_batches, std::size_t count);

}  // namespace reef
