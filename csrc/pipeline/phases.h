#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "pipeline/generators.h"

namespace reef {

/// A part of a rank's order: actions that are repeated. A rank has two streams of micro-batches, and each
/// action is written with its stream: in "F0 B1", F is that of the next micro-batch of stream 0, and B that
/// of stream 1. "W0" is the W of stream 0 whose I was first, "W*" that of either stream; it is left out if
/// none is to be made.
struct PipelinePhase {
  std::uint32_t times = 0;
  std::string_view actions;
};

/// Says which chunk and micro-batch the n-th passes of a stream are of. If it returns nullopt, they are left
/// out.
using PassOfStream = std::function<std::optional<PipelineTurn>(std::uint32_t stream, std::uint32_t number)>;

/// Writes a rank's phases out. Those W that are left come last, in the order of their I.
std::vector<PipelineAction> actions_of(const std::vector<PipelinePhase>& phases, const PassOfStream& pass_of);

}  // namespace reef
