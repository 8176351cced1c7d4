#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "reef/timeline.h"
#include "timeline/replay.h"

namespace reef {

/// A timeline cut into `count` equal columns of time, each with the largest state that was alive in it, if
/// only for an instant. Every column is a state that existed, so its categories belong together.
/// `nanoseconds` > 0 is the time that the columns span.
inline std::vector<CategoryBytes> largest_per_column(const Timeline& timeline, std::size_t device,
                                                     std::size_t count, double nanoseconds) {
  CategoryBytes now = timeline.start[device];
  std::vector<CategoryBytes> columns(count, now);
  std::size_t column = 0;
  for (const TimelineEvent& event : timeline.events) {
    if (event.device != device) continue;
    const double position = static_cast<double>(event.nanoseconds) * static_cast<double>(count) / nanoseconds;
    const double last = static_cast<double>(count - 1);
    const auto target = std::max(column, static_cast<std::size_t>(std::clamp(position, 0.0, last)));
    // An event on the very edge of its column leaves the state before it no time there.
    const bool replaces = target > column && position == static_cast<double>(target);
    std::fill(columns.begin() + static_cast<std::ptrdiff_t>(column) + 1,
              columns.begin() + static_cast<std::ptrdiff_t>(target) + 1, now);
    column = target;
    apply(event, now);
    if (replaces || now.total() > columns[column].total()) columns[column] = now;
  }
  std::fill(columns.begin() + static_cast<std::ptrdiff_t>(column) + 1, columns.end(), now);
  return columns;
}

}  // namespace reef
