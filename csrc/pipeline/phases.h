#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "pipeline/generators.h"

namespace reef {

/// A part of a rank's order: actions that are repeated `times` times. A rank has two streams of
/// micro-batches, and each action names its stream: in "F0 B1", F runs the next micro-batch of stream 0
/// forward, and B the next of stream 1 backward. "W0" is the oldest W of stream 0 that is still to be done
/// after its I, "W*" the oldest of either stream; it is skipped if there is none.
struct PipelinePhase {
  std::uint32_t times = 0;
  std::string_view actions;
};

/// Returns the chunk and the micro-batch of pass `number` of a stream, or nullopt if that pass is to be
/// skipped.
using PassOfStream = std::function<std::optional<PipelineTurn>(std::uint32_t stream, std::uint32_t number)>;

/// Expands the phases of a rank into its actions. Each W that the phases leave to be done comes last, in the
/// order of the I.
std::vector<PipelineAction> actions_of(const std::vector<PipelinePhase>& phases, const PassOfStream& pass_of);

}  // namespace reef
