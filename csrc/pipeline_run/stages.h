#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "reef/pipeline.h"

namespace reef {

/// Returns a stage for each module, which shares it.
std::vector<PipelineStage> stages_of(const torch::nn::Sequential& modules);

/// Returns functions that give the stages.
std::vector<Pipeline::Maker> makers_of(const std::vector<PipelineStage>& stages);

/// Names of parameters and buffers, with the numbers of the stages that have them.
using StageNames = std::vector<std::pair<std::uint32_t, std::string>>;

/// Returns the names that the stages of all ranks have, by stage and in the order in which a rank gives them.
/// All ranks of the group call it alike, each with what it has. Throws RankFailed.
std::map<std::uint32_t, std::vector<std::string>> names_on_all_ranks(const StageNames& own,
                                                                     const ProcessGroupPtr& group);

}  // namespace reef
