#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "ledger/blocks.h"
#include "ledger/observe.h"
#include "reef/ledger.h"

namespace reef {

/// What one ledger keeps for itself: its peaks, and the timeline while one is recorded. Read and written
/// under the lock of Blocks only (changed() runs under it; the ledger's reads go through Blocks::frozen).
class __attribute__((visibility("hidden"))) Ledger::Books final : public ChangeListener {
 public:
  Books();
  ~Books() override;
  Books(const Books&) = delete;
  Books& operator=(const Books&) = delete;

  void changed(const Change& change, const CategoryBytes& live) override;
  void sampled(const std::string& counter, std::int64_t value) override;

  struct DevicePeaks {
    bool used = false;
    std::int64_t total = 0;
    CategoryBytes at_total;
    const std::string* op = nullptr;
    CategoryBytes by_category;
  };
  const DevicePeaks& peaks(std::size_t slot) const { return peaks_[slot]; }
  void reset_peaks(const std::array<CategoryBytes, kDeviceSlots>& live);

  void start_timeline(std::size_t max_events, const std::array<CategoryBytes, kDeviceSlots>& live);
  std::optional<Timeline> stop_timeline();

  std::vector<torch::optim::Optimizer*> optimizers;

 private:
  void record(const Change& change);
  bool has_room();
  std::int64_t since_start() const;

  std::array<DevicePeaks, kDeviceSlots> peaks_{};

  std::optional<Timeline> timeline_;
  std::size_t max_events_ = 0;
  std::chrono::steady_clock::time_point started_;
  std::unordered_map<const std::string*, std::int32_t> op_index_;
  std::unordered_map<const std::string*, std::uint32_t> counter_index_;

  Observation observation_;
};

}  // namespace reef
