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
  /// contain. After the update that ends a worker's wave, its weights contain the others' waves up to
  /// `staleness` waves before that one (the pull of HetPipe, 2005.14038, section 5).
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

/// Of each chunk, how many updates its weights have had since a forward pass when they get its gradient: tau
/// of PipeMare (1910.05124, section 2), as the mean over the micro-batches of the last update. Throws
/// ConfigError as pipeline_versions() does, and for a schedule without updates.
REEF_API std::vector<double> pipeline_delays(const PipelineSchedule& schedule);

/// By what PipeMare multiplies the learning rate of a chunk with such a delay at update number `update` (its
/// technique 1, section 3.1): 1 / max(delay, 1) ^ (1 - min(update / annealing_updates, 1)).
REEF_API double pipemare_rate(double delay, std::uint64_t update, std::uint64_t annealing_updates);

}  // namespace reef
