#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <boost/intrusive/list_hook.hpp>
#include <boost/smart_ptr/intrusive_ptr.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "page/transfer.h"
#include "reef/category.h"
#include "reef/tier.h"
#include "swap/step_learner.h"

namespace reef {

class PageWay;
class Pager;

/// What is in memory.
enum class PageState : std::uint8_t {
  kResident,  ///< in memory only
  kClean,     ///< in memory, and the tier has the same bytes: may leave without being written
  kLeaving,   ///< in memory, and being written to the tier
  kAway,      ///< in the tier only: an access throws or, where addresses stay, waits until it is back
  kComing,    ///< as kAway, and being read into a block that is counted already
};

/// Memory that leaves and comes as one: that of one storage, or where addresses stay a range of them, of
/// which a large storage has several and small ones share one. `bytes`, and what is known of its next use,
/// are the learner's; the rest is read and written under its pager's lock.
///
/// Owned by whoever may still ask for it: the table, the data pointer of a storage whose bytes are away, the
/// frames of running operators, threads that move it, and the learner.
struct Page final : LearnedPage {
  Page(Pager& of, PageWay& by) : pager(of), way(&by) {}

  Pager& pager;
  PageWay* const way;  ///< in which it leaves and comes
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
  std::string name;                   ///< as the program knows it; empty: not told
  const void* data = nullptr;         ///< where it is, or was, in memory
  const void* block_start = nullptr;  ///< where addresses stay: of the block that it is a part of
  std::uint64_t frame_bytes = 0;      ///< where addresses stay: how many it has, a multiple of 4096
  PageState state = PageState::kResident;
  Category category = Category::kOther;  ///< while away: what its block was
  bool gone = false;                     ///< its storage is, or holds other memory: no page any longer
  bool parameter = false;                ///< a leaf that requires a gradient
  bool preparing = false;                ///< a thread is about to evict it, and has not begun to copy
  bool being_hashed = false;             ///< a thread reads its memory, outside the lock
  bool being_moved = false;              ///< a thread moves its frames, outside the lock
  bool leaves_pinned = false;            ///< being prepared although pinned, since all that is in memory is
  bool untouched = false;      ///< where addresses stay: in memory, and gets frames when it is touched
  bool counted_away = false;   ///< where addresses stay: for the ledger its bytes are not in memory
  bool busy = false;           ///< a device was at work with its frames when it was to leave
  bool refused = false;        ///< whoever asks its storage for the memory is refused, with an error
  bool leaves_beside = false;  ///< kLeaving: beside the operators
  bool was_clean = false;      ///< kLeaving: it was kClean, so that it may turn out to be written already
  bool hashes = false;         ///< where addresses stay: it has been kLeaving and clean, and may be again
  bool leaves_last = false;    ///< when no other can: its address goes, in a budget where addresses stay
  bool shared = false;         ///< where addresses stay: by small blocks, and most operators
  bool learned = false;     ///< the learner knows it: an operator that could be of a step has used or made it
  bool stays = false;       ///< its address is kept by others, or it is used on several streams
  std::uint32_t pins = 0;   ///< operators that run on it, and calls of pin()
  std::uint32_t holds = 0;  ///< of these, calls of pin(): they outlast a budget
  std::uint64_t version = 0;   ///< writes that were observed
  std::uint64_t last_use = 0;  ///< by the pager's clock
  std::size_t index = 0;       ///< in the table
  std::uint64_t stream = 0;    ///< of its device, on which its operators run

  std::shared_ptr<Tier> tier;  ///< of `slot`
  std::optional<Tier::Slot> slot;
  bool keeps = false;                  ///< the slot only counts the bytes, whose memory is kept
  std::optional<std::uint64_t> hash;   ///< of what the slot holds, where it was wanted
  std::uint64_t copied_version = 0;    ///< kLeaving: of what is being written
  std::shared_ptr<Transfer> transfer;  ///< kLeaving, kComing
  c10::DataPtr block;                  ///< kComing; or given back while it was being read
  c10::DataPtr kept;                   ///< kAway: its frames, which `slot` only counts

  boost::intrusive::list_member_hook<> pinned;  ///< where addresses stay: while it is pinned in memory
  boost::intrusive::list_member_hook<> order;   ///< of eviction, while it may leave
  boost::intrusive::list_member_hook<> copies;  ///< while it is in memory and has a slot all the same

  /// Smaller storages stay where they are: moving one costs more than its bytes are worth.
  static constexpr std::uint64_t kLeastBytes = 1024;

  /// What the tier has are old bytes, or will be.
  void written() {
    if (state == PageState::kClean) state = PageState::kResident;
  }
  /// Its bytes count: it could give them back.
  bool in_memory() const { return state != PageState::kAway && !gone; }
  /// Its memory is being read outside the lock, so it cannot be given back now.
  bool being_read() const {
    return being_hashed || (state == PageState::kLeaving && transfer != nullptr && !transfer->done());
  }
};
using PagePtr = boost::intrusive_ptr<Page>;

}  // namespace reef
