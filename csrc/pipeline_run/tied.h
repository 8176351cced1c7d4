#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/segments.h"
#include "pipeline_run/stages.h"
#include "reef/pipeline.h"

namespace reef {

/// Weights that stages of different chunks share (an embedding and the head of a language model, say).

/// All names of one parameter, in the order of the stages that use it. Its gradients and states have the
/// first.
using TiedNames = std::vector<std::string>;

/// Tied parameters that the same ranks have, which belong to several segments.
struct TiedSegment {
  std::vector<std::int64_t> ranks;  ///< of the group, replica after replica, and ascending for each
  std::vector<TiedNames> parameters;
};

/// Finds the parameters that several stages share, and returns their names. Throws ConfigError if stages have
/// parameters that share memory otherwise, since their gradients would be added up in another order.
std::vector<TiedNames> find_tied(const MadeStages& made);

/// Throws ConfigError unless all names of a tied parameter that this rank has are of one tensor.
void check_tied(const MadeStages& made, const std::vector<TiedNames>& tied);

/// Returns the number of the stage that each name is of. `names`: those of all ranks. Throws ConfigError if a
/// name is that of several parameters.
std::map<std::string, std::uint32_t> stages_of_names(const NamesOfStages& names);

/// Returns the tied parameters whose uses are in several segments, grouped by the ranks that have them. Those
/// of one segment need nothing. `cuts`: of each replica. Throws ConfigError if there is no parameter of a
/// name.
std::vector<TiedSegment> tied_segments(const std::vector<TiedNames>& tied,
                                       const std::map<std::string, std::uint32_t>& stage_of,
                                       const PipelineSchedule& schedule,
                                       const std::vector<PipelineCuts>& cuts);

/// Returns those tied parameters of this rank, by their first names, whose uses are in several chunks.
/// `cuts`: of its replica.
std::vector<std::pair<std::string, at::Tensor>> used_by_several_chunks(
    const std::vector<TiedNames>& tied, const MadeStages& made,
    const std::map<std::string, std::uint32_t>& stage_of, const PipelineCuts& cuts);

/// Throws ConfigError if one of these parameters has a hook, since the hook would be called for each chunk
/// with the gradient of that chunk's uses, instead of once with their sum.
void check_no_hooks(const std::vector<std::pair<std::string, at::Tensor>>& used_by_several);

}  // namespace reef
