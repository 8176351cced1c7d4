#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "json.h"
#include "reef/bytes.h"
#include "reef/error.h"
#include "reef/timeline.h"
#include "timeline/replay.h"

namespace reef {
namespace {

/// The format counts in microseconds; three decimals keep every nanosecond.
std::string microseconds(std::int64_t nanoseconds) {
  const std::string fraction = std::to_string(nanoseconds % 1000 + 1000);
  return std::to_string(nanoseconds / 1000) + "." + fraction.substr(1);
}

/// "parameter":1,"gradient":2,... in the order of Category.
std::string series(const CategoryBytes& bytes) {
  std::string text;
  for (std::size_t i = 0; i < kCategories; ++i) {
    text += i == 0 ? "\"" : ",\"";
    text += name(static_cast<Category>(i));
    text += "\":" + std::to_string(bytes.of[i]);
  }
  return text;
}

/// One process; a thread per device carries what is said about it.
class TraceWriter {
 public:
  explicit TraceWriter(std::size_t bytes) { text_.reserve(bytes); }

  void event(std::string_view phase, std::string_view quoted_name, std::size_t device,
             std::int64_t nanoseconds, std::string_view args) {
    text_ += text_.empty() ? "{\"traceEvents\":[\n" : ",\n";
    text_ += "{\"ph\":\"";
    text_ += phase;
    text_ += phase == "i" ? "\",\"s\":\"t\",\"name\":" : "\",\"name\":";
    text_ += quoted_name;
    text_ += ",\"pid\":1,\"tid\":" + std::to_string(device + 1) + ",\"ts\":" + microseconds(nanoseconds);
    text_ += ",\"args\":{";
    text_ += args;
    text_ += "}}";
  }

  std::string finish(const Timeline& timeline) && {
    text_ += "\n],\"displayTimeUnit\":\"ms\"";
    if (timeline.events_dropped > 0) {
      text_ += ",\"otherData\":{\"events_dropped\":" + std::to_string(timeline.events_dropped) +
               ",\"note\":" + json_string("the recording was full: the trace ends before the program did") +
               "}";
    }
    return std::move(text_) + "}\n";
  }

 private:
  std::string text_;
};

}  // namespace

std::string chrome_trace(const Timeline& timeline) {
  constexpr std::size_t kBytesPerEvent = 240;
  TraceWriter trace(kBytesPerEvent * (timeline.events.size() + timeline.samples.size() + 8));
  trace.event("M", "\"process_name\"", 0, 0, "\"name\":\"Reef\"");

  std::vector<CategoryBytes> alive;
  std::vector<std::string> tracks;
  for (std::size_t device = 0; device < timeline.devices.size(); ++device) {
    check_device(timeline, device);
    const std::string& device_name = timeline.devices[device];
    alive.push_back(timeline.start[device]);
    tracks.push_back(json_string("bytes alive (" + device_name + ")"));
    trace.event("M", "\"thread_name\"", device, 0, "\"name\":" + json_string(device_name));
    trace.event("C", tracks[device], device, 0, series(alive[device]));
  }
  for (const TimelineEvent& event : timeline.events) {
    check_device(timeline, event.device);
    apply(event, alive[event.device]);
    trace.event("C", tracks[event.device], event.device, event.nanoseconds, series(alive[event.device]));
  }
  std::vector<std::string> counters;
  for (const std::string& counter : timeline.counters) counters.push_back(json_string(counter));
  for (const TimelineSample& sample : timeline.samples) {
    if (sample.counter >= counters.size()) {
      throw ConfigError("chrome_trace: a sample is of counter " + std::to_string(sample.counter) +
                        ", and the timeline has " + std::to_string(counters.size()));
    }
    trace.event("C", counters[sample.counter], 0, sample.nanoseconds,
                "\"value\":" + std::to_string(sample.value));
  }
  for (std::size_t device = 0; device < timeline.devices.size(); ++device) {
    const TimelinePeak peak = peak_of(timeline, device);
    const std::string bytes = std::to_string(peak.bytes.total());
    const std::string label = "peak: " + format_bytes(peak.bytes.total()) + " " + place_of(timeline, peak);
    trace.event("i", json_string(label), device, time_of(timeline, peak),
                "\"bytes\":" + bytes + ",\"operator\":" + json_string(operator_of(timeline, peak)) + "," +
                    series(peak.bytes));
  }
  return std::move(trace).finish(timeline);
}

}  // namespace reef
