#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "reef/category.h"
#include "reef/tier.h"

namespace reef {

/// What is in memory.
enum class PageState : std::uint8_t {
  kResident,  ///< in memory only
  kClean,     ///< in memory, and the tier has the same bytes: may leave without being written
  kAway,      ///< in the tier only; any access to the storage throws
};

/// The memory behind one storage.
struct Page {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
  const void* data = nullptr;  ///< where it is, or was, in memory
  std::uint64_t bytes = 0;
  PageState state = PageState::kResident;
  Category category = Category::kOther;  ///< while away: what its block was
  bool dead = false;                     ///< its storage is gone; kept until the last pin is
  std::uint32_t pins = 0;                ///< operators running on it
  std::uint64_t last_use = 0;            ///< by the pager's clock
  std::size_t index = 0;                 ///< in the pager's list
  std::shared_ptr<Tier> tier;            ///< of `slot`
  std::optional<Tier::Slot> slot;
};

}  // namespace reef
