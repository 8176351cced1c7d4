#include "page/peaks.h"

#include <algorithm>

namespace reef {

void Peaks::see() {
  const std::uint64_t peak = memory_.take_peak();
  own_.peak_bytes = std::max(own_.peak_bytes, peak);
  for (PeakMark* mark : marks_) mark->peak_bytes = std::max(mark->peak_bytes, peak);
}

void Peaks::reset() {
  see();
  own_.peak_bytes = memory_.alive_bytes();
}

}  // namespace reef
