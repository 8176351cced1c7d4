#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "reef/timeline.h"

namespace reef {

/// What one event does to the bytes of its device.
inline void apply(const TimelineEvent& event, CategoryBytes& bytes) {
  bytes[event.category] += event.bytes;
  if (event.kind == TimelineEvent::Kind::kMove) bytes[event.from] -= event.bytes;
}

/// Throws ConfigError unless `device` is an index into both Timeline::devices and Timeline::start.
void check_device(const Timeline& timeline, std::size_t device);

/// The operator that reached a peak, "" if there was none.
std::string operator_of(const Timeline& timeline, const TimelinePeak& peak);

/// Where a peak was reached, in words: "in aten::mm", "outside any operator" or "at the start".
std::string place_of(const Timeline& timeline, const TimelinePeak& peak);

/// When it was reached, in nanoseconds since the timeline began.
inline std::int64_t time_of(const Timeline& timeline, const TimelinePeak& peak) {
  return peak.event < 0 ? 0 : timeline.events[static_cast<std::size_t>(peak.event)].nanoseconds;
}

}  // namespace reef
