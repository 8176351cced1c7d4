#pragma once

#include <cstdint>
#include <vector>

#include "page/memory.h"

namespace reef {

/// A point in time, with the peak since then. The object must not move in memory.
struct PeakMark {
  std::uint64_t peak_bytes = 0;     ///< the most bytes that were alive at once since then
  std::uint64_t evicted_bytes = 0;  ///< the total of bytes evicted until then
  std::uint64_t start = 0;          ///< how many budgets had begun until then; 0 if the mark is not set yet
};

/// Tracks the peaks of a memory since several points in time. Read and written under the pager's lock.
class Peaks {
 public:
  explicit Peaks(Memory& memory) : memory_(memory) {}

  /// Keeps the mark up to date until it is removed.
  void add(PeakMark& mark) { marks_.push_back(&mark); }
  void remove(PeakMark& mark) { std::erase(marks_, &mark); }
  /// Brings all marks up to date.
  void see();

  /// Returns the peak since the last reset().
  std::uint64_t peak_bytes() const { return own_.peak_bytes; }
  void reset();

 private:
  Memory& memory_;
  PeakMark own_;
  std::vector<PeakMark*> marks_;
};

}  // namespace reef
