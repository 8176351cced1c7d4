#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/recompute.h"
#include "reef/pipeline_partition.h"

namespace reef {

/// Chunks of more stages than this have too many ways to be recomputed to look at all of them.
inline constexpr std::uint32_t kFewStages = 8;

/// Returns the choices for the chunk of these stages that may be best, in ascending order of seconds. What a
/// run recomputes when it is recomputed is by plan_chain(), for several bytes that this may take. For chunks
/// of up to kFewStages, any other choice without runs within runs is no faster than one of these that takes
/// no more bytes. In longer chunks some are left out, and only a run of all stages has runs within it.
std::vector<RecomputeChoice> recompute_choices(const PipelineProfile& profile, std::uint32_t first,
                                               std::uint32_t end);

}  // namespace reef
