#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "pipeline/parcels.h"
#include "reef/pipeline_schedule.h"

namespace reef {

/// A schedule as one replica of several in a group runs it: with its messages, whose ranks are those of the
/// group.
class PipelineCourse {
 public:
  /// With `lanes` above 0, what the last chunk gives for micro-batch m is the input of the first chunk for
  /// micro-batch m + lanes.
  PipelineCourse(PipelineSchedule schedule, const std::vector<PipelineSkip>& skips, std::uint32_t replica,
                 std::uint32_t replicas, std::uint32_t lanes = 0);

  const PipelineSchedule& schedule() const { return schedule_; }
  std::uint32_t lanes() const { return lanes_; }
  /// In the order in which each rank sends them.
  const std::vector<PipelineMessage>& messages() const { return messages_; }

  /// A message, and what is in it.
  struct Delivery {
    PipelineMessage message;
    bool has_outputs = true;         ///< the outputs of a chunk, or the gradients of its inputs
    std::vector<std::size_t> skips;  ///< numbers of the skips that are in it, too
  };
  /// Returns what an action makes for others, which may be on the same rank, and what it needs of others.
  std::vector<Delivery> made_by(const PipelineAction& action) const;
  std::vector<Delivery> needed_by(const PipelineAction& action) const;

 private:
  PipelineMessage in_group(PipelineMessage message) const;
  /// Returns what the first chunk's input for a micro-batch follows from, if it is not given.
  std::optional<PipelineMessage> leads_to(std::uint32_t micro_batch) const;

  PipelineSchedule schedule_;
  PipelineParcels parcels_;
  std::uint32_t replica_, replicas_, lanes_;
  std::vector<PipelineMessage> messages_;
};

}  // namespace reef
