#pragma once

#include <cstdint>
#include <vector>

#include "reef/export.h"
#include "reef/pipeline_schedule.h"

namespace reef {

/// Pure data and pure code (no Torch): which weights an asynchronous pipeline uses, so that one process can
/// repeat its recurrence bit for bit.

/// The weights that a chunk uses for a micro-batch. Version v is the weights after v updates of the chunk.
struct PipelineVersion {
  std::uint32_t forward = 0;
  std::uint32_t backward = 0;
  /// Of PipelineVersionRule::Kind::kWave: the number of waves of every other virtual worker that both
  /// contain.
  std::uint32_t others_waves = 0;

  friend bool operator==(const PipelineVersion&, const PipelineVersion&) = default;
};

struct PipelineVersions {
  /// Of each chunk, for each micro-batch.
  std::vector<std::vector<PipelineVersion>> of;
  /// Of each chunk, the most versions of its weights that are held at once: the newest, and those before it
  /// that later passes need.
  std::vector<std::uint32_t> most_alive;
};

/// Applies a schedule's rule to its order of actions. Throws ConfigError for what check() throws, for a rule
/// other than kFlush in a schedule of two directions, and if a pass needs a version that its rank does not
/// have by then.
REEF_API PipelineVersions pipeline_versions(const PipelineSchedule& schedule);

}  // namespace reef
