#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace reef {

/// Addresses whose faults could not be served, and how often. Who touched one may have gone on meanwhile: a
/// fault is told when it happens, and its page may come, and be freed, before it is heard. That happens now
/// and then at an address that is used all the time. One that is real comes again as soon as whoever waits is
/// woken, and again and again.
class FaultTrouble {
 public:
  using Time = std::chrono::steady_clock::time_point;
  /// So many times, each within this time of the one before: it is real.
  static constexpr int kMostTimes = 8;
  static constexpr std::chrono::seconds kComesAgain{2};

  /// How often it has come so, with this time.
  int times_now(std::uint64_t address, Time now = std::chrono::steady_clock::now()) {
    if (troubles_.size() > kMostAddresses) troubles_.clear();
    Trouble& trouble = troubles_[address];
    trouble.times = now - trouble.last > kComesAgain ? 1 : trouble.times + 1;
    trouble.last = now;
    return trouble.times;
  }
  /// It was served.
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
