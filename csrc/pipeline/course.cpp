#include "pipeline/course.h"

#include <utility>

#include "pipeline/progress.h"
#include "pipeline/segments.h"

namespace reef {

PipelineCourse::PipelineCourse(PipelineSchedule schedule, const std::vector<PipelineSkip>& skips,
                               std::uint32_t replica, std::uint32_t replicas, std::uint32_t lanes)
    : schedule_(std::move(schedule)),
      parcels_(schedule_.chunks(), skips),
      replica_(replica),
      replicas_(replicas),
      lanes_(lanes) {
  for (const std::vector<PipelineAction>& actions : schedule_.actions) {
    for (const PipelineAction& action : actions) {
      for (const Delivery& delivery : made_by(action)) {
        if (delivery.message.from != delivery.message.to) messages_.push_back(delivery.message);
      }
    }
  }
}

std::vector<PipelineCourse::Delivery> PipelineCourse::made_by(const PipelineAction& action) const {
  std::vector<Delivery> all;
  for (const PipelineParcel& parcel : parcels_.made_by(action))
    all.push_back({in_group(message_of(schedule_, action, parcel)), parcel.is_to_next, parcel.skips});
  const bool is_end = action.kind == PipelineAction::Kind::kForward && action.chunk + 1 == schedule_.chunks();
  if (is_end && lanes_ > 0 && action.micro_batch + lanes_ < schedule_.micro_batches)
    all.push_back({*leads_to(action.micro_batch + lanes_), true, {}});
  return all;
}

std::vector<PipelineCourse::Delivery> PipelineCourse::needed_by(const PipelineAction& action) const {
  std::vector<Delivery> all;
  for (const PipelineParcel& parcel : parcels_.needed_by(action))
    all.push_back({in_group(message_of(schedule_, action, parcel)), parcel.is_to_next, parcel.skips});
  if (action.kind == PipelineAction::Kind::kForward && action.chunk == 0) {
    if (const auto before = leads_to(action.micro_batch)) all.push_back({*before, true, {}});
  }
  return all;
}

PipelineMessage PipelineCourse::in_group(PipelineMessage message) const {
  message.from = rank_in_group(message.from, replica_, replicas_);
  message.to = rank_in_group(message.to, replica_, replicas_);
  return message;
}

std::optional<PipelineMessage> PipelineCourse::leads_to(std::uint32_t micro_batch) const {
  if (lanes_ == 0 || micro_batch < lanes_) return std::nullopt;
  const std::uint32_t last = schedule_.chunks() - 1, before = micro_batch - lanes_;
  return in_group({PipelineMessage::Kind::kNext, last, 0, before, schedule_.rank(last, before),
                   schedule_.rank(0, micro_batch)});
}

}  // namespace reef
