#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "ledger/blocks.h"

namespace reef {

/// How much is alive on a device, and the most since it was last asked to begin. For less than a Ledger:
/// names no operator, and puts no allocator in place.
class PeakMeter final : public ChangeListener {
 public:
  explicit PeakMeter(std::size_t slot) : slot_(slot) {
    std::array<CategoryBytes, kDeviceSlots> live;
    Blocks::instance().add(this, live);
    begin();
  }
  ~PeakMeter() override { Blocks::instance().remove(this); }
  PeakMeter(const PeakMeter&) = delete;
  PeakMeter& operator=(const PeakMeter&) = delete;

  /// Gives what is alive, from which the peak begins anew.
  std::int64_t begin() {
    return Blocks::instance().frozen([&](const auto& live) { return peak_ = of(live[slot_]); });
  }
  std::int64_t live() const {
    return Blocks::instance().frozen([&](const auto& live) { return of(live[slot_]); });
  }
  std::int64_t peak() const {
    return Blocks::instance().frozen([&](const auto&) { return peak_; });
  }

  void changed(const Change& change, const CategoryBytes& live) override {
    if (change.slot == slot_) peak_ = std::max(peak_, of(live));
  }
  void sampled(const std::string&, std::int64_t) override {}

 private:
  static std::int64_t of(const CategoryBytes& live) {
    return live[Category::kActivation] + live[Category::kOther];
  }

  std::size_t slot_;
  std::int64_t peak_ = 0;
};

}  // namespace reef
