#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/segments.h"
#include "reef/pipeline.h"

namespace reef {

/// Weights that stages of different chunks share (an embedding and the head of a language model, say).

/// The names of one parameter, in the order of stages. The first one is its own.
using TiedNames = std::vector<std::string>;

/// Parameters whose ranks are those of several segments.
struct TiedSegment {
  std::vector<std::int64_t> ranks;  ///< of the group, ascending
  std::vector<TiedNames> parameters;
};

/// Stages that have been made on this rank, with their numbers.
using MadeStages = std::vector<std::pair<std::uint32_t, PipelineStage>>;

/// Returns the names of parameters that several of the stages have. Throws ConfigError if stages have
/// parameters that share memory otherwise, since their gradients would be added up in another order.
std::vector<TiedNames> find_tied(const MadeStages& made);

/// Throws ConfigError unless what is named alike here is one tensor.
void check_tied(const MadeStages& made, const std::vector<TiedNames>& tied);

/// Returns those parameters that ranks of one segment do not have among themselves. `first_stages`: of each
/// chunk. All ranks of the group call it alike, with what they have made. Throws ConfigError on every rank if
/// there is no parameter of a name, and RankFailed.
std::vector<TiedSegment> tied_segments(const std::vector<TiedNames>& tied, const MadeStages& made,
                                       const std::vector<std::uint32_t>& first_stages,
                                       const PipelineSchedule& schedule, std::uint32_t replicas,
                                       const ProcessGroupPtr& group);

}  // namespace reef
