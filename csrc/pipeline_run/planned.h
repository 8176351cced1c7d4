#pragma once

#include <string>
#include <vector>

#include "reef/pipeline.h"

namespace reef {

/// Plans a pipeline for options.sample, and gives the options the schedule and cuts. Returns the plan's text.
/// All ranks call it alike. Throws what measure_pipeline() and plan_pipeline() throw, or ConfigError on ranks
/// other than the first replica's.
std::string plan_for_sample(const std::vector<Pipeline::Maker>& stages, const ProcessGroupPtr& group,
                            PipelineOptions& options);

}  // namespace reef
