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

/// Owns all pages: finds them by storage or address, adds up their bytes, and orders them for eviction. Read
/// and written under the pager's lock. Pointers that it returns are valid until the lock is released.
class PageTable {
 public:
  PageTable(Memory& memory, StepLearner& learner);

  /// Returns the storage's page, or nullptr if it has none.
  Page* find(c10::StorageImpl& storage);
  /// Returns the page at this address whose address does not stay, or nullptr.
  Page* at(const void* data) const;
  /// Makes a page of `storage` and returns it, or nullptr if the storage cannot be one: it is too small,
  /// shared, not from the memory's allocator, or in use by an operator that is running already.
  Page* add(Pager& pager, PageWay& way, c10::StorageImpl& storage);
  /// Adds a page whose address stays, which may be in memory or away.
  void add(const PagePtr& page);
  /// Removes a page and marks it `gone` for those who still have a pointer to it.
  void remove(Page& page);

  void pin(Page& page);
  void unpin(Page& page);
  /// Takes the page out of the victims while a thread prepares to evict it, and puts it back unless it is
  /// pinned.
  void begin_preparing(Page& page);
  void end_preparing(Page& page);
  /// Notes that another thread is freeing the page's storage, so the page is no longer being prepared.
  void being_freed(Page& page);
  /// Returns the page that should leave first, or nullptr if none can. With `known`, next uses decide. With
  /// `others_too`, it may be a page that another thread prepares already. A page that leaves last is only
  /// chosen if there is no other.
  Page* victim(bool known, bool others_too);
  /// Does the same, but never returns one of `spared`.
  Page* victim_but(c10::ArrayRef<PagePtr> spared, bool known, bool others_too);

  /// How many pages one instruction may need at once. If addresses stay and these pages evicted one another,
  /// the instruction would never complete.
  static constexpr std::size_t kTogether = 8;
  /// Returns a pinned page to evict, whose address stays and which is none of `spared`: among the pages that
  /// only operators pin, the one that has been in memory for longest, because it has most likely been used
  /// already. Returns nullptr if no more than kTogether are pinned.
  Page* pinned_victim(c10::ArrayRef<PagePtr> spared = {}) const;
  /// Pins a page whose frames a device holds, until retry_busy().
  void busy(Page& page);
  /// Unpins all busy pages, so that they can be evicted again. Returns false if there are none.
  bool retry_busy();

  /// Note that the page is away, is on its way back (its bytes count from then on), is back, or has stayed
  /// away after all.
  void left(Page& page);
  void coming(Page& page);
  void came(Page& page);
  void stayed_away(Page& page);
  /// Note that a page whose address does not stay is at `data` from now on, or has left its address.
  void place(Page& page, const void* data);
  void unplace(const Page& page);

  /// Note that a running operator uses a storage that is no page, or no longer does. In between, the storage
  /// must not become a page.
  void use_unknown(const void* data) { ++unknown_[data]; }
  void unuse_unknown(const void* data);

  const std::vector<PagePtr>& pages() const { return pages_; }
  /// Whether the page may leave and no thread is preparing to evict it.
  static bool is_victim(const Page& page) { return Victims::has(page); }
  /// Notes that the page's next use has changed.
  void next_use_changed(Page& page) { victims_of(page).changed(page); }
  /// Notes that the learner knows the page from now on.
  void learned(Page& page);
  /// Returns the bytes of pages in memory that the learner knows.
  std::uint64_t learned_bytes() const { return learned_bytes_; }
  /// Returns the bytes of pages in memory.
  std::uint64_t memory_bytes() const { return memory_bytes_; }
  /// Returns the bytes of pages in memory that are not pinned.
  std::uint64_t evictable_bytes() const { return evictable_bytes_; }

 private:
  void count(const Page& page, bool there);
  void count_away(const Page& page, bool away);
  void may_leave_again(Page& page);
  Victims& victims_of(const Page& page) { return page.leaves_last ? last_victims_ : victims_; }
  void list_pinned(Page& page);
  void unlist_pinned(Page& page);

  Memory& memory_;
  StepLearner& learner_;  ///< notified when a page is removed
  std::vector<PagePtr> pages_;
  boost::unordered_flat_map<const void*, Page*> by_data_;          ///< pages in memory
  boost::unordered_flat_map<const void*, std::uint32_t> unknown_;  ///< how many operators use each storage
  Victims victims_;
  Victims last_victims_;
  boost::intrusive::list<Page, boost::intrusive::member_hook<Page, boost::intrusive::list_member_hook<>,
                                                             &Page::pinned>>
      pinned_;  ///< in the order in which they came or were pinned
  std::vector<PagePtr> busy_;
  std::vector<PagePtr> preparing_;
  std::uint64_t memory_bytes_ = 0;
  std::uint64_t learned_bytes_ = 0;
  std::uint64_t evictable_bytes_ = 0;
  std::uint64_t away_bytes_ = 0;
  const std::string away_counter_;
};

}  // namespace reef
