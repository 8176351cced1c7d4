#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/ArrayRef.h>

#include <boost/intrusive/list.hpp>
#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "page/memory.h"
#include "page/page.h"
#include "page/victims.h"

namespace reef {

/// Has all pages: finds them by storage or address, sums them up, and orders them for eviction. Read and
/// written under the pager's lock. Pointers that it returns are valid until the lock is released.
class PageTable {
 public:
  PageTable(Memory& memory, StepLearner& learner);

  /// Returns the storage's page, or nullptr if it is none.
  Page* find(c10::StorageImpl& storage);
  /// Returns the page at this address whose address does not stay, or nullptr.
  Page* at(const void* data) const;
  /// Makes a page of `storage` and returns it, or nullptr if the storage cannot be one: it is too small,
  /// shared, not from the memory's allocator, or in use by an operator that began before.
  Page* add(Pager& pager, PageWay& way, c10::StorageImpl& storage);
  /// Adds a page whose address stays, which may be in memory or away.
  void add(const PagePtr& page);
  /// Removes a page. Whoever still has it finds it `gone`.
  void remove(Page& page);

  void pin(Page& page);
  void unpin(Page& page);
  /// Takes the page out of the victims while a thread prepares to evict it; and puts it back, unless it is
  /// pinned.
  void begin_preparing(Page& page);
  void end_preparing(Page& page);
  /// Notes that the page is on its way back, and then stays: it is not being prepared any longer.
  void being_freed(Page& page);
  /// Returns the page that should leave first, or nullptr if none can. With `known` that is decided by next
  /// use. With `others_too` it may be one that another thread prepares already. Pages that leave last are
  /// chosen when there is no other.
  Page* victim(bool known, bool others_too);
  /// Returns the same, but none of `spared`.
  Page* victim_but(c10::ArrayRef<PagePtr> spared, bool known, bool others_too);

  /// So many pages one instruction may need at once. Where addresses stay it would never end if one pushed
  /// out another.
  static constexpr std::size_t kTogether = 8;
  /// Returns the page that has been in memory for longest among those that only operators pin, since they
  /// have most likely used it already; for pages whose addresses stay, and none of `spared`. Returns nullptr
  /// if no more than kTogether are pinned.
  Page* pinned_victim(c10::ArrayRef<PagePtr> spared = {}) const;
  /// Pins a page whose frames a device holds, until retry_busy().
  void busy(Page& page);
  /// Lets all busy pages be tried once more. Returns false if there are none.
  bool retry_busy();

  /// Note that the page is away, is on its way back (its bytes count from then on), is back, and has stayed
  /// away after all.
  void left(Page& page);
  void coming(Page& page);
  void came(Page& page);
  void stayed_away(Page& page);
  /// Note that a page whose address does not stay is at `data` from now on, and that it has left its address.
  void place(Page& page, const void* data);
  void unplace(const Page& page);

  /// Note that a running operator uses a storage that is no page, which must not become one until then.
  void use_unknown(const void* data) { ++unknown_[data]; }
  void unuse_unknown(const void* data);

  const std::vector<PagePtr>& pages() const { return pages_; }
  /// Whether the page may leave, and no thread prepares it to.
  static bool is_victim(const Page& page) { return Victims::has(page); }
  /// Notes that the page's next use has changed.
  void next_use_changed(Page& page) { victims_of(page).changed(page); }
  /// Notes that the learner knows the page from now on.
  void learned(Page& page);
  /// Bytes of pages in memory that the learner knows.
  std::uint64_t learned_bytes() const { return learned_bytes_; }
  /// Bytes of pages in memory.
  std::uint64_t memory_bytes() const { return memory_bytes_; }
  /// Bytes of pages in memory that are not pinned.
  std::uint64_t evictable_bytes() const { return evictable_bytes_; }

 private:
  void count(const Page& page, bool there);
  void count_away(const Page& page, bool away);
  void may_leave_again(Page& page);
  Victims& victims_of(const Page& page) { return page.leaves_last ? last_victims_ : victims_; }
  void list_pinned(Page& page);
  void unlist_pinned(Page& page);

  Memory& memory_;
  StepLearner& learner_;  ///< is told when a page is removed
  std::vector<PagePtr> pages_;
  boost::unordered_flat_map<const void*, Page*> by_data_;          ///< pages in memory
  boost::unordered_flat_map<const void*, std::uint32_t> unknown_;  ///< how many operators use each storage
  Victims victims_;
  Victims last_victims_;
  boost::intrusive::list<Page, boost::intrusive::member_hook<Page, boost::intrusive::list_member_hook<>,
                                                             &Page::pinned>>
      pinned_;  ///< in the order in which they came, or were pinned
  std::vector<PagePtr> busy_;
  std::vector<PagePtr> preparing_;
  std::uint64_t memory_bytes_ = 0;
  std::uint64_t learned_bytes_ = 0;
  std::uint64_t evictable_bytes_ = 0;
  std::uint64_t away_bytes_ = 0;
  const std::string away_counter_;
};

}  // namespace reef
