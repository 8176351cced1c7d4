#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "page/transfer.h"
#include "reef/category.h"
#include "reef/tier.h"
#include "swap/step_learner.h"

namespace reef {

class Pager;

/// What is in memory.
enum class PageState : std::uint8_t {
  kResident,  ///< in memory only
  kClean,     ///< in memory, and the tier has the same bytes: may leave without being written
  kLeaving,   ///< in memory, and being written to the tier
  kAway,      ///< in the tier only; any access to the storage throws
  kComing,    ///< as kAway, and being read into a block that is counted already
};

/// The memory behind one storage. `bytes`, and what is known of its next use, are the learner's.
struct Page : LearnedPage {
  Pager* pager = nullptr;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
  const void* data = nullptr;  ///< where it is, or was, in memory
  PageState state = PageState::kResident;
  Category category = Category::kOther;  ///< while away: what its block was
  bool parameter = false;                ///< a leaf that requires a gradient
  bool dead = false;                     ///< its storage is gone; kept until the last pin is
  std::uint32_t pins = 0;                ///< operators running on it
  std::uint64_t last_use = 0;            ///< by the pager's clock
  std::size_t index = 0;                 ///< in the table
  std::uint64_t stream = 0;              ///< of its device, on which its operators run
  bool stays = false;                    ///< used on several streams: pinned for good
  std::shared_ptr<Tier> tier;            ///< of `slot`
  std::optional<Tier::Slot> slot;
  std::uint64_t hash = 0;              ///< of what the slot holds
  std::shared_ptr<Transfer> transfer;  ///< kLeaving, kComing
  c10::DataPtr block;                  ///< kComing

  /// Its bytes count: it could give them back.
  bool in_memory() const { return state != PageState::kAway && !dead; }
};

}  // namespace reef
