#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace reef {

/// Counts the faults at each address that could not be served. A single one is no error: a fault is queued
/// when it happens, and before it is read, its page may come back, the thread may go on, and the page may be
/// freed. At a busy address this happens now and then. A real fault repeats each time that its thread is
/// woken.
class FaultTrouble {
 public:
  using Time = std::chrono::steady_clock::time_point;
  /// A fault is real if it comes this many times, each within kComesAgain of the one before.
  static constexpr int kMostTimes = 8;
  static constexpr std::chrono::seconds kComesAgain{2};

  /// Notes a fault at `address` and returns how many have come in a row.
  int times_now(std::uint64_t address, Time now = std::chrono::steady_clock::now()) {
    if (troubles_.size() > kMostAddresses) troubles_.clear();
    Trouble& trouble = troubles_[address];
    trouble.times = now - trouble.last > kComesAgain ? 1 : trouble.times + 1;
    trouble.last = now;
    return trouble.times;
  }
  /// Notes that a fault at `address` was served.
  void over(std::uint64_t address) { troubles_.erase(address); }

 private:
  static constexpr std::size_t kMostAddresses = 1024;
  struct Trouble {
    int times = 0;
    Time last;
  };
  std::unordered_map<std::uint64_t, Trouble> troubles_;
};

}  // namespace reef
