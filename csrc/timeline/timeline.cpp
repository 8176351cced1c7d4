#include "reef/timeline.h"

#include "reef/error.h"
#include "timeline/replay.h"

namespace reef {

void check_device(const Timeline& timeline, std::size_t device) {
  if (device < timeline.devices.size() && device < timeline.start.size()) return;
  throw ConfigError("Timeline: there is no device " + std::to_string(device) + ", it has " +
                    std::to_string(timeline.devices.size()) + " devices with " +
                    std::to_string(timeline.start.size()) +
                    " start values; give an index into Timeline::devices");
}

std::string operator_of(const Timeline& timeline, const TimelinePeak& peak) {
  if (peak.event < 0) return "";
  const std::int32_t op = timeline.events[static_cast<std::size_t>(peak.event)].op;
  return op < 0 ? "" : timeline.operators.at(static_cast<std::size_t>(op));
}

std::string place_of(const Timeline& timeline, const TimelinePeak& peak) {
  if (peak.event < 0) return "at the start";
  const std::string op = operator_of(timeline, peak);
  return op.empty() ? "outside any operator" : "in " + op;
}

CategoryBytes bytes_after(const Timeline& timeline, std::size_t device, std::size_t count) {
  check_device(timeline, device);
  if (count > timeline.events.size()) {
    throw ConfigError("bytes_after: " + std::to_string(count) + " events asked for, the timeline has " +
                      std::to_string(timeline.events.size()) + "; ask for at most that many");
  }
  CategoryBytes bytes = timeline.start[device];
  for (std::size_t i = 0; i < count; ++i) {
    if (timeline.events[i].device == device) apply(timeline.events[i], bytes);
  }
  return bytes;
}

TimelinePeak peak_of(const Timeline& timeline, std::size_t device) {
  check_device(timeline, device);
  CategoryBytes bytes = timeline.start[device];
  TimelinePeak peak{-1, bytes};
  std::int64_t largest = bytes.total();
  for (std::size_t i = 0; i < timeline.events.size(); ++i) {
    if (timeline.events[i].device != device) continue;
    apply(timeline.events[i], bytes);
    if (bytes.total() <= largest) continue;
    largest = bytes.total();
    peak = {static_cast<std::int64_t>(i), bytes};
  }
  return peak;
}

}  // namespace reef
