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
  kClean,     ///< in memory, and the tier has the same bytes, so the page can leave without being written
  kLeaving,   ///< in memory, and being written to the tier
  kAway,      ///< in the tier only: an access throws or, if addresses stay, waits until the page is back
  kComing,    ///< like kAway, but being read into a block that already counts as alive
};

/// A piece of memory that is evicted and fetched as a whole. It is the memory of one storage or, if addresses
/// stay, a range of addresses: a large storage has several pages, and small storages share one. `bytes` and
/// the predicted next use belong to the learner; everything else is read and written under the pager's lock.
///
/// A page is owned by everything that may still ask for it: the table, the data pointer of a storage whose
/// bytes are away, the frames of running operators, threads that move it, and the learner.
struct Page final : LearnedPage {
  Page(Pager& of, PageWay& by) : pager(of), way(&by) {}

  // ---- identity

  Pager& pager;
  PageWay* const way;  ///< how it leaves and comes back
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
  std::string name;                      ///< the name that the program gave it, or empty
  const void* data = nullptr;            ///< its address in memory; while it is away, its last address
  Category category = Category::kOther;  ///< of its block; valid while it is away
  bool parameter = false;                ///< whether it is a leaf that requires a gradient
  bool leaves_last = false;              ///< it leaves only if no other page can: its address does not stay
  std::uint64_t stream = 0;  ///< the device's stream that its block belongs to (Memory::stream_of)

  // ---- use

  std::uint32_t pins = 0;      ///< running operators that use it, plus calls of pin()
  std::uint32_t holds = 0;     ///< calls of pin() among `pins`, which outlast a budget
  std::uint64_t version = 0;   ///< number of writes that were observed
  std::uint64_t last_use = 0;  ///< by the pager's clock
  bool learned = false;        ///< the learner knows it: an operator of a step has used or made it
  bool stays = false;          ///< it must not move: others keep its address, or several streams use it

  // ---- place

  PageState state = PageState::kResident;
  bool gone = false;           ///< it is no longer a page: its storage has been freed, or holds other memory
  bool preparing = false;      ///< a thread is about to evict it, and has not begun to copy
  bool being_hashed = false;   ///< a thread reads its memory without the lock
  bool leaves_pinned = false;  ///< it is being prepared although pinned, because all pages in memory are
  bool leaves_beside = false;  ///< kLeaving: whether it is written while operators run
  bool was_clean = false;      ///< kLeaving: it was kClean, so nothing is written if that still holds
  std::uint64_t copied_version = 0;    ///< kLeaving: the version that is being written
  std::shared_ptr<Transfer> transfer;  ///< kLeaving, kComing
  c10::DataPtr block;  ///< kComing: the memory that is read into; kLeaving: memory that was freed meanwhile

  // ---- copy in a tier

  std::shared_ptr<Tier> tier;  ///< the tier that `slot` belongs to
  std::optional<Tier::Slot> slot;
  std::optional<std::uint64_t> hash;  ///< of what the slot holds, if it was computed

  // ---- only if its address stays

  const void* block_start = nullptr;  ///< the start of the block that it is a part of
  std::uint64_t frame_bytes = 0;      ///< the size of its frames; 0 if its address does not stay
  bool shared = false;                ///< it is a slab of small blocks, which most operators use
  bool being_moved = false;           ///< a thread moves its frames without the lock
  bool untouched = false;             ///< it is in memory, but gets frames only when it is touched
  bool counted_away = false;          ///< the ledger does not count its bytes
  bool busy = false;                  ///< a device held its frames when it was about to leave
  std::uint32_t refusals = 0;         ///< how often its storages are refused because it could not come
  bool hashes = false;  ///< its bytes are hashed when they are written, because it may leave clean
  bool keeps = false;   ///< the slot only counts its bytes, which stay in `kept`
  c10::DataPtr kept;    ///< kAway: its frames

  // ---- maintained by the table and the mover

  std::size_t index = 0;                        ///< in the table
  boost::intrusive::list_member_hook<> order;   ///< linked in the order of eviction while it may leave
  boost::intrusive::list_member_hook<> pinned;  ///< linked while pinned in memory, if its address stays
  boost::intrusive::list_member_hook<> copies;  ///< linked while it is in memory and also has a slot

  /// Smaller storages are no pages, because moving one would cost more than it saves.
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
