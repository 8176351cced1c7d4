#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/segments.h"
#include "reef/pipeline.h"

namespace reef {

/// Weights that stages of different chunks share (an embedding and the head of a language model, say).

/// All names of one parameter, in the order of the stages that use it. Its gradients and states have the
/// first.
using TiedNames = std::vector<std::string>;

/// Tied parameters that the same ranks have, which belong to several segments.
struct TiedSegment {
  std::vector<std::int64_t> ranks;  ///< of the group, ascending
  std::vector<TiedNames> parameters;
};

/// Stages that have been made on this rank, with their numbers.
using MadeStages = std::vector<std::pair<std::uint32_t, PipelineStage>>;

/// Finds the parameters that several stages share, and returns their names. Throws ConfigError if stages have
/// parameters that share memory otherwise, since their gradients would be added up in another order.
std::vector<TiedNames> find_tied(const MadeStages& made);

/// Throws ConfigError unless all names of a tied parameter that this rank has are of one tensor.
void check_tied(const MadeStages& made, const std::vector<TiedNames>& tied);

/// Returns the tied parameters whose uses are in several segments, grouped by the ranks that have them. Those
/// of one segment need nothing. `first_stages` has the number of each chunk's first stage. All ranks of the
/// group call it alike, with what they have made. Throws ConfigError on every rank if there is no parameter
/// of a name, and RankFailed.
std::vector<TiedSegment> tied_segments(const std::vector<TiedNames>& tied, const MadeStages& made,
                                       const std::vector<std::uint32_t>& first_stages,
                                       const PipelineSchedule& schedule, std::uint32_t replicas,
                                       const ProcessGroupPtr& group);

}  // namespace reef
