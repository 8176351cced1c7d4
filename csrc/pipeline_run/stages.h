#pragma once

#include <vector>

#include "reef/pipeline.h"

namespace reef {

/// Returns a stage for each module, which shares it.
std::vector<PipelineStage> stages_of(const torch::nn::Sequential& modules);

/// Returns functions that give the stages.
std::vector<Pipeline::Maker> makers_of(const std::vector<PipelineStage>& stages);

}  // namespace reef
