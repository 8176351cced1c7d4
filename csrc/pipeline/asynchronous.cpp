#include <algorithm>

#include "pipeline/generators.h"
#include "reef/error.h"

namespace reef {
namespace {

using Rule = PipelineVersionRule::Kind;

PipelineSchedule updated_every(const PipelineShape& shape, std::uint32_t k, PipelineVersionRule versions) {
  PipelineSchedule schedule = with_updates(one_f_one_b(shape), k);
  schedule.versions = versions;
  return schedule;
}

/// Gives the number of micro-batches of an update or wave: the user's, or `least`.
std::uint32_t at_least(std::uint32_t given, std::uint32_t least, const std::string& what) {
  if (given == 0) return least;
  if (given < least)
    throw ConfigError("pipeline schedule " + what + " of at least " + std::to_string(least) +
                      " micro-batches at this depth, not of " + std::to_string(given) +
                      "; give more, or smaller hops");
  return given;
}

}  // namespace

PipelineSchedule pipedream(const PipelineShape& shape) {
  const std::uint32_t k = std::max(1U, shape.micro_batches_per_update);
  return updated_every(shape, k, {Rule::kStash, k, 0});
}

PipelineSchedule pipedream_vertical(const PipelineShape& shape) {
  const std::uint32_t k = std::max(1U, shape.micro_batches_per_update);
  return updated_every(shape, k, {Rule::kVertical, k, 0});
}

// Update t - 1 must be there when the first forward pass of batch t + 1 runs: all but depth - 1 of the
// backward passes before it have run then.
PipelineSchedule pipedream_2bw(const PipelineShape& shape) {
  const std::uint32_t least = std::max(1U, depth_of(shape, 0) - 1);
  const std::uint32_t k =
      at_least(shape.micro_batches_per_update, least, "'pipedream_2bw': two versions need updates");
  return updated_every(shape, k, {Rule::kTwoBuffers, k, 0});
}

PipelineSchedule pipemare(const PipelineShape& shape) {
  const std::uint32_t k = std::max(1U, shape.micro_batches_per_update);
  return updated_every(shape, k, {Rule::kNewest, k, 0});
}

// A virtual worker takes a local step after each micro-batch, and has a wave of them in flight.
PipelineSchedule hetpipe(const PipelineShape& shape) {
  const std::uint32_t wave = at_least(shape.micro_batches_per_update, depth_of(shape, 0),
                                      "'hetpipe': what is in flight needs waves");
  return updated_every(shape, 1, {Rule::kWave, wave, shape.staleness});
}

}  // namespace reef
