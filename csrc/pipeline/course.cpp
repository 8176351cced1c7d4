#include "pipeline/course.h"

#include <utility>

#include "pipeline/progress.h"
#include "pipeline/segments.h"

namespace reef {

PipelineCourse::PipelineCourse(PipelineSchedule schedule, std::uint32_t replica, std::uint32_t replicas,
                               std::uint32_t lanes)
    : schedule_(std::move(schedule)), replica_(replica), replicas_(replicas), lanes_(lanes) {
  for (const std::vector<PipelineAction>& actions : schedule_.actions) {
    for (const PipelineAction& action : actions) {
      if (const auto message = message_of(action); message && message->from != message->to)
        messages_.push_back(*message);
    }
  }
}

std::optional<PipelineMessage> PipelineCourse::message_of(const PipelineAction& action) const {
  const bool is_last = action.chunk + 1 == schedule_.chunks();
  const bool is_output = action.kind == PipelineAction::Kind::kForward;
  if (is_last && is_output) {
    return lanes_ > 0 && action.micro_batch + lanes_ < schedule_.micro_batches
               ? leads_to(action.micro_batch + lanes_)
               : std::nullopt;
  }
  std::optional<PipelineMessage> message =
      reef::message_of(schedule_, schedule_.rank(action.chunk, action.micro_batch), action);
  if (!message) return message;
  message->from = rank_in_group(message->from, replica_, replicas_);
  message->to = rank_in_group(message->to, replica_, replicas_);
  return message;
}

std::optional<PipelineMessage> PipelineCourse::leads_to(std::uint32_t micro_batch) const {
  if (lanes_ == 0 || micro_batch < lanes_) return std::nullopt;
  const std::uint32_t last = schedule_.chunks() - 1, before = micro_batch - lanes_;
  return PipelineMessage{PipelineMessage::Kind::kNext, last, before,
                         rank_in_group(schedule_.rank(last, before), replica_, replicas_),
                         rank_in_group(schedule_.rank(0, micro_batch), replica_, replicas_)};
}

}  // namespace reef
