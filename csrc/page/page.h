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

/// Where a page's bytes are.
enum class PageState : std::uint8_t {
  kResident,  ///< in memory only
  kClean,     ///< in memory, and the tier has the same bytes: the page may leave without being written
  kLeaving,   ///< in memory, and being written to the tier
  kAway,      ///< in the tier only: an access throws or, where addresses stay, waits until the page is back
  kComing,    ///< as kAway, and being read into a block that counts as alive already
};

/// Memory that leaves and comes as one: that of one storage or, where addresses stay, a range of addresses,
/// of which a large storage has several, and small storages share one. `bytes` and what is known of the next
/// use belong to the learner; everything else is read and written under the pager's lock.
///
/// A page is owned by whoever may still ask for it: the table, the data pointer of a storage whose bytes are
/// away, the frames of running operators, threads that move it, and the learner.
struct Page final : LearnedPage {
  Page(Pager& of, PageWay& by) : pager(of), way(&by) {}

  // ---- what it is

  Pager& pager;
  PageWay* const way;  ///< how it leaves and comes
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
  std::string name;                      ///< that the program gave it, or empty
  const void* data = nullptr;            ///< its address in memory, the last one while it is away
  Category category = Category::kOther;  ///< of its block; valid while it is away
  bool parameter = false;                ///< it is a leaf that requires a gradient
  bool leaves_last = false;              ///< it leaves when no other page can: its address does not stay
  std::uint64_t stream = 0;              ///< of its device, to which its block belongs (Memory::stream_of)

  // ---- who uses it

  std::uint32_t pins = 0;      ///< operators that run on it, and calls of pin()
  std::uint32_t holds = 0;     ///< of these, calls of pin(), which outlast a budget
  std::uint64_t version = 0;   ///< number of writes that were observed
  std::uint64_t last_use = 0;  ///< by the pager's clock
  bool learned = false;        ///< the learner knows it: an operator of a step has used or made it
  bool stays = false;          ///< it must not move: others keep its address, or several streams use it

  // ---- where it is

  PageState state = PageState::kResident;
  bool gone = false;           ///< no page any longer: its storage has been freed, or holds other memory
  bool preparing = false;      ///< a thread is about to evict it, and has not begun to copy
  bool being_hashed = false;   ///< a thread reads its memory without the lock
  bool leaves_pinned = false;  ///< it is being prepared although it is pinned, since all pages in memory are
  bool leaves_beside = false;  ///< kLeaving: beside the operators
  bool was_clean = false;  ///< kLeaving: it was kClean, so nothing needs to be written if that is still so
  std::uint64_t copied_version = 0;    ///< kLeaving: the version that is being written
  std::shared_ptr<Transfer> transfer;  ///< kLeaving, kComing
  c10::DataPtr block;  ///< kComing: the memory that is read into; kLeaving: memory that was freed meanwhile

  // ---- its bytes in a tier

  std::shared_ptr<Tier> tier;  ///< that `slot` belongs to
  std::optional<Tier::Slot> slot;
  std::optional<std::uint64_t> hash;  ///< of what the slot holds, if it was computed

  // ---- where addresses stay

  const void* block_start = nullptr;  ///< the start of the block that it is a part of
  std::uint64_t frame_bytes = 0;      ///< bytes of its frames; 0: its address does not stay
  bool shared = false;                ///< small blocks lie in it, which most operators use
  bool being_moved = false;           ///< a thread moves its frames without the lock
  bool untouched = false;             ///< it is in memory, and gets frames when it is touched
  bool counted_away = false;          ///< the ledger does not count its bytes
  bool busy = false;                  ///< a device held its frames when it was to leave
  std::uint32_t refusals = 0;         ///< of storages of its to operators, since it could not come
  bool hashes = false;  ///< its bytes are hashed when they are written, since it may leave clean
  bool keeps = false;   ///< the slot only counts its bytes, and `kept` has them
  c10::DataPtr kept;    ///< kAway: its frames

  // ---- maintained by the table and the mover

  std::size_t index = 0;                        ///< in the table
  boost::intrusive::list_member_hook<> order;   ///< of eviction, while it may leave
  boost::intrusive::list_member_hook<> pinned;  ///< while it is pinned in memory, where addresses stay
  boost::intrusive::list_member_hook<> copies;  ///< while it is in memory and has a slot all the same

  /// Smaller storages are no pages: moving one costs more than its bytes are worth.
  static constexpr std::uint64_t kLeastBytes = 1024;

  /// Notes that the page is written: the tier's bytes are out of date.
  void written() {
    if (state == PageState::kClean) state = PageState::kResident;
  }
  /// Whether its bytes count as alive, so that evicting it would free them.
  bool in_memory() const { return state != PageState::kAway && !gone; }
  /// Whether a thread reads its memory without the lock, so that the memory cannot be freed now.
  bool being_read() const {
    return being_hashed || (state == PageState::kLeaving && transfer != nullptr && !transfer->done());
  }
};
using PagePtr = boost::intrusive_ptr<Page>;

}  // namespace reef
