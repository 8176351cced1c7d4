#pragma once

#include <atomic>

namespace reef {

/// `most` becomes no less than `value`, whatever other threads do with it.
template <class Count>
void raise(std::atomic<Count>& most, Count value) {
  Count before = most.load(std::memory_order_relaxed);
  while (value > before && !most.compare_exchange_weak(before, value, std::memory_order_relaxed)) {
  }
}

/// The most that `live` has been since the last such call, of those that raise `peak` with it.
template <class Count>
Count take_peak(std::atomic<Count>& peak, const std::atomic<Count>& live) {
  const Count most = peak.exchange(0);
  raise(peak, live.load());  // what another thread makes meanwhile is in one of them
  return most;
}

}  // namespace reef
