#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>

#include "reef/tier.h"

namespace reef {

/// The slots of a tier that are taken, with the tier's own Place for each, and what they come to. Not
/// thread-safe.
template <class Place>
class Slots {
 public:
  explicit Slots(std::uint64_t capacity_bytes) { use.capacity_bytes = capacity_bytes; }

  std::uint64_t free_bytes() const { return use.capacity_bytes - use.used_bytes; }

  /// `room_bytes` count as used until it is removed.
  Tier::Slot add(Place place, std::uint64_t room_bytes) {
    taken_.emplace(next_, Taken{std::move(place), room_bytes});
    use.used_bytes += room_bytes;
    use.peak_bytes = std::max(use.peak_bytes, use.used_bytes);
    return next_++;
  }
  /// nullopt if it is not taken.
  std::optional<Place> remove(Tier::Slot slot) {
    const auto found = taken_.find(slot);
    if (found == taken_.end()) return std::nullopt;
    Taken taken = std::move(found->second);
    taken_.erase(found);
    use.used_bytes -= taken.room_bytes;
    return std::move(taken.place);
  }
  /// Stays where it is when others come and go.
  Place& at(Tier::Slot slot) { return taken_.at(slot).place; }

  TierUse use;

 private:
  struct Taken {
    Place place;
    std::uint64_t room_bytes;
  };
  std::unordered_map<Tier::Slot, Taken> taken_;
  Tier::Slot next_ = 0;
};

}  // namespace reef
