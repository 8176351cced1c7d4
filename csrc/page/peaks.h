#pragma once

#include <cstdint>
#include <vector>

#include "page/memory.h"

namespace reef {

/// A time from which on somebody wants to know how much was alive. It must not move.
struct PeakMark {
  std::uint64_t peak_bytes = 0;     ///< the most that was alive since then
  std::uint64_t evicted_bytes = 0;  ///< bytes evicted in all until then
  std::uint64_t start = 0;          ///< how many budgets had begun until then; 0: not set yet
};

/// The most that was alive in a memory since each of several times. Read and written under the pager's lock.
class Peaks {
 public:
  explicit Peaks(Memory& memory) : memory_(memory) {}

  /// Keeps the mark up to date until it is removed.
  void add(PeakMark& mark) { marks_.push_back(&mark); }
  void remove(PeakMark& mark) { std::erase(marks_, &mark); }
  /// Brings all marks up to date.
  void see();

  /// Returns the most since the last reset().
  std::uint64_t peak_bytes() const { return own_.peak_bytes; }
  void reset();

 private:
  Memory& memory_;
  PeakMark own_;
  std::vector<PeakMark*> marks_;
};

}  // namespace reef
