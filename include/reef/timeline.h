#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reef/category.h"
#include "reef/export.h"

namespace reef {

/// Pure data (no Torch): every change of the bytes alive between two moments, and pictures of it.

/// One change. Bytes alive per category after it are those before it, plus `bytes` on `category`; a move
/// takes the same bytes off `from`.
struct TimelineEvent {
  enum class Kind : std::uint8_t { kAllocate, kFree, kMove };

  std::int64_t nanoseconds = 0;  ///< since the timeline began
  std::int64_t bytes = 0;        ///< > 0 for kAllocate and kMove, < 0 for kFree
  std::int32_t op = -1;          ///< index into Timeline::operators; -1: outside any operator
  std::uint8_t device = 0;       ///< index into Timeline::devices
  Kind kind = Kind::kAllocate;
  Category category = Category::kOther;
  Category from = Category::kOther;  ///< kMove only
};

/// A number beside the bytes alive, from one moment on.
struct TimelineSample {
  std::int64_t nanoseconds = 0;  ///< since the timeline began
  std::int64_t value = 0;
  std::uint32_t counter = 0;  ///< index into Timeline::counters
};

struct Timeline {
  std::vector<std::string> devices;     ///< "cpu", "cuda:0", ...
  std::vector<CategoryBytes> start;     ///< bytes alive when the timeline began, one entry per device
  std::vector<std::string> operators;   ///< "aten::mm", or "aten::mm (backward)"
  std::vector<TimelineEvent> events;    ///< in order
  std::vector<std::string> counters;    ///< of a budget: "bytes away (cpu)", "bytes moved out (cpu)", ...
  std::vector<TimelineSample> samples;  ///< in order; a counter has no value before its first
  std::int64_t events_dropped = 0;  ///< changes that no longer fitted; nonzero: `events` and `samples` are
                                    ///< prefixes
  std::int64_t duration_nanoseconds = 0;
};

/// Bytes alive on `device` after the first `count` events.
REEF_API CategoryBytes bytes_after(const Timeline& timeline, std::size_t device, std::size_t count);

/// The largest total on `device`, its breakdown, and the index of the event that reached it first (-1: the
/// start).
struct TimelinePeak {
  std::int64_t event = -1;
  CategoryBytes bytes;
};
REEF_API TimelinePeak peak_of(const Timeline& timeline, std::size_t device);

/// Chrome trace format (JSON, opens in Perfetto and chrome://tracing): one counter track per device with a
/// series per category, one per counter, and an instant event at each device's peak that names the operator.
REEF_API std::string chrome_trace(const Timeline& timeline);

struct ChartOptions {
  std::string title = "Bytes alive";
  std::int64_t budget_bytes = 0;  ///< > 0: drawn as a horizontal line
  int width = 960;                ///< pixels
  int height = 420;               ///< pixels
};

/// A self-contained SVG: time to the right, bytes upward, one band per category, the peak marked with its
/// operator. Timelines of any length come to at most about two points a pixel; a pixel column shows its
/// largest total.
REEF_API std::string memory_chart(const Timeline& timeline, std::size_t device,
                                  const ChartOptions& options = {});

}  // namespace reef
