#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "reef/chain.h"
#include "reef/pipeline.h"

namespace reef {

/// Returns a stage for each module, which shares it.
std::vector<PipelineStage> stages_of(const torch::nn::Sequential& modules);

/// Returns a stage for each stage of the chain; both share its modules. Throws ConfigError if a stage was
/// added to the chain without its module, since its parameters are not known then.
std::vector<PipelineStage> stages_of(const Chain& chain);

/// Returns functions that give the stages.
std::vector<Pipeline::Maker> makers_of(const std::vector<PipelineStage>& stages);

/// Stages that have been made on this rank, with their numbers.
using MadeStages = std::vector<std::pair<std::uint32_t, PipelineStage>>;

/// Names that stages have, with the numbers of these stages.
using StageNames = std::vector<std::pair<std::uint32_t, std::string>>;
using NamesOfStages = std::map<std::uint32_t, std::vector<std::string>>;

/// Returns the names that the stages of all ranks have, by stage and in the order in which a rank gives them.
/// All ranks of the group call it alike, each with what it has. Throws RankFailed.
NamesOfStages names_on_all_ranks(const StageNames& own, const ProcessGroupPtr& group);

/// What stages tell all ranks by names.
struct ToldNames {
  NamesOfStages parameters, gives, takes;
};
/// As names_on_all_ranks().
ToldNames tell_names(const MadeStages& made, const ProcessGroupPtr& group);

}  // namespace reef
