#pragma once

#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>

#include "ledger/peak_meter.h"

namespace reef {

/// How many bytes a run of a chain needs, while its forward pass and its backward pass are under way, and the
/// program's own between them are not.
class RunMeter {
 public:
  RunMeter(std::size_t slot, std::function<void(std::uint64_t)> needed)
      : meter_(slot), needed_(std::move(needed)), before_(meter_.begin()) {}

  /// The forward pass is over.
  void leave() {
    look();
    kept_ = meter_.live() - before_;
    is_away_ = true;
  }
  /// Backward has come to the chain, with a gradient of so many bytes.
  void come_back(std::uint64_t gradient_bytes) {
    if (!std::exchange(is_away_, false)) return;
    before_ = meter_.begin() - kept_ - static_cast<std::int64_t>(gradient_bytes);
  }
  void end() {
    if (is_away_ || !needed_) return;
    look();
    std::exchange(needed_, {})(static_cast<std::uint64_t>(std::max<std::int64_t>(0, most_)));
  }

 private:
  void look() { most_ = std::max(most_, meter_.peak() - before_); }

  PeakMeter meter_;
  std::function<void(std::uint64_t)> needed_;
  std::int64_t before_;  ///< what is alive and not the run's
  std::int64_t kept_ = 0, most_ = 0;
  bool is_away_ = false;
};

}  // namespace reef
