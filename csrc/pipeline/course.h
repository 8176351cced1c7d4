#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "reef/pipeline_schedule.h"

namespace reef {

/// A schedule as one replica of several in a group runs it: with its messages, whose ranks are those of the
/// group.
class PipelineCourse {
 public:
  /// With `lanes` above 0, what the last chunk gives for micro-batch m is the input of the first chunk for
  /// micro-batch m + lanes.
  PipelineCourse(PipelineSchedule schedule, std::uint32_t replica, std::uint32_t replicas,
                 std::uint32_t lanes = 0);

  const PipelineSchedule& schedule() const { return schedule_; }
  std::uint32_t lanes() const { return lanes_; }
  /// In the order in which each rank sends them.
  const std::vector<PipelineMessage>& messages() const { return messages_; }
  /// Returns what an action makes for another one, which may be on the same rank.
  std::optional<PipelineMessage> message_of(const PipelineAction& action) const;
  /// Returns what the first chunk's input for a micro-batch follows from, if it is not given.
  std::optional<PipelineMessage> leads_to(std::uint32_t micro_batch) const;

 private:
  PipelineSchedule schedule_;
  std::uint32_t replica_, replicas_, lanes_;
  std::vector<PipelineMessage> messages_;
};

}  // namespace reef
