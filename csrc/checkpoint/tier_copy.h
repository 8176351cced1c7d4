#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "page/memory.h"
#include "reef/tier.h"

namespace reef {

/// A tier, and how this device's memory is copied to it and back, beside the program.
struct TierLane {
  TierLane(std::shared_ptr<Tier> tier, c10::Device device);
  /// Nobody else may write to what is copied, so nobody asks.
  static constexpr bool kHashed = false;

  std::shared_ptr<Tier> tier;
  std::unique_ptr<Memory> memory;
};

/// Storages whose bytes are in a tier, or on their way there, and perhaps no longer in memory. They do not
/// change meanwhile. An error of a copy is thrown where it is waited for; memory that was there stays then.
class TierCopy {
 public:
  /// Begins to copy. `what` they are ("the tape of stage 3") begins an error's sentence. Throws BudgetError
  /// if the tier has no room.
  TierCopy(TierLane& lane, const std::vector<c10::Storage>& storages, std::string what);
  /// Gives the tier's room back. Storages that are away stay so.
  ~TierCopy();
  TierCopy(const TierCopy&) = delete;
  TierCopy& operator=(const TierCopy&) = delete;

  /// Waits for the copies, and frees the memory of storages of which nobody has a reference but those that
  /// `references` counts: who has one may look at it. Whoever asks for such memory now gets an error.
  void evict(const std::function<std::size_t(const c10::StorageImpl&)>& references);
  /// Takes the memory again, and begins to copy back. Throws what the allocator throws; then it stays away.
  void prefetch();
  /// Until that is there. Without effect if nothing is on its way.
  void arrive();

 private:
  struct Piece;
  Tier::Slot take(std::size_t bytes) const;
  void give_back() noexcept;
  TierLane& lane_;
  std::string what_;
  std::vector<Piece> pieces_;
};

}  // namespace reef
