#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "page/cuda_stream_copy.h"
#include "reef/tier.h"

namespace reef {

/// Keeps a tier's slots while a device works on them: the host goes on before a copy is over, and a slot that
/// it gives back then could be taken for a page of another stream, whose copy does not wait for this one.
/// Thread-safe.
class CudaSlots {
 public:
  CudaSlots() = default;
  CudaSlots(const CudaSlots&) = delete;
  CudaSlots& operator=(const CudaSlots&) = delete;
  /// Waits for the device.
  ~CudaSlots();

  /// Notes that the device works on the slot until it reaches `end`.
  void used_until(std::shared_ptr<CudaEvent> end, const std::shared_ptr<Tier>& tier, Tier::Slot slot);
  /// Takes a slot of `bytes` from the tier, if it has room. If not, slots that were given back are returned
  /// to the tier first, even if the device has to be waited for.
  std::optional<Tier::Slot> take(Tier& tier, std::uint64_t bytes);
  /// Gives the slot back immediately if the device has finished with it, and otherwise in a later call.
  void give_back(const std::shared_ptr<Tier>& tier, Tier::Slot slot) noexcept;
  /// Waits until the tiers have all slots that were given back. Returns false if they had them before.
  bool finish() noexcept;

 private:
  using Key = std::pair<std::shared_ptr<Tier>, Tier::Slot>;
  struct Use {
    std::vector<std::shared_ptr<CudaEvent>> ends;
    bool given_back = false;
  };
  bool settle() noexcept;

  std::mutex mutex_;
  std::map<Key, Use> uses_;
  std::size_t settle_at_ = kSettleAtLeast;  ///< this many uses; querying an event costs about a microsecond
  static constexpr std::size_t kSettleAtLeast = 16;
};

}  // namespace reef
