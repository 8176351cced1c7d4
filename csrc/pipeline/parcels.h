#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "reef/pipeline_schedule.h"

namespace reef {

/// What one chunk sends to another for each micro-batch.
struct PipelineParcel {
  std::uint32_t from = 0;          ///< chunk
  std::uint32_t to = 0;            ///< chunk
  bool is_to_next = false;         ///< it contains the output for the next chunk, or the gradient for the
                                   ///< chunk before
  std::vector<std::size_t> skips;  ///< the numbers of the skips that it contains
};

/// Returns the number of the chunk that has a stage. `cuts`: as PipelineCuts.
std::uint32_t chunk_of(std::uint32_t stage, const std::vector<std::uint32_t>& cuts);

/// Turns a skip between stages into one between the chunks that have them. Its list of takers is empty if all
/// of these stages are in one chunk.
PipelineSkip between_chunks(PipelineSkip skip, const std::vector<std::uint32_t>& cuts);

/// Lists the parcels of all chunks of a pipeline.
class PipelineParcels {
 public:
  /// Throws ConfigError for skips that are not from a chunk to later ones, in ascending order.
  PipelineParcels(std::uint32_t chunks, const std::vector<PipelineSkip>& skips);

  /// Those that an action makes: a forward pass outputs, a backward pass (B or I) gradients.
  const std::vector<PipelineParcel>& made_by(const PipelineAction& action) const;
  /// Those that it needs.
  const std::vector<PipelineParcel>& needed_by(const PipelineAction& action) const;

 private:
  using OfChunks = std::vector<std::vector<PipelineParcel>>;
  const std::vector<PipelineParcel>& of(const PipelineAction& action, const OfChunks& outputs,
                                        const OfChunks& gradients) const;

  OfChunks outputs_made_, outputs_needed_, gradients_made_, gradients_needed_;
  std::vector<PipelineParcel> none_;
};

/// Returns the message in which a parcel travels, between ranks of the schedule. `action` makes it or needs
/// it.
PipelineMessage message_of(const PipelineSchedule& schedule, const PipelineAction& action,
                           const PipelineParcel& parcel);

}  // namespace reef
