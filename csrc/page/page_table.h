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

/// All pages, found by storage or by address, the sums over them, and the order in which they would leave.
/// Read and written under the pager's lock.
class PageTable {
 public:
  PageTable(Memory& memory, StepLearner& learner);

  /// nullptr if the storage is no page. Here and below, valid until the lock is released.
  Page* find(c10::StorageImpl& storage);
  Page* at(const void* data) const;
  /// Makes a page of `storage`; nullptr if it can be none: too small, not of the memory's allocator, shared,
  /// or in use by an operator that does not know that it may leave.
  Page* add(Pager& pager, PageWay& way, c10::StorageImpl& storage);
  /// Adds a page whose address stays, which may be in memory or away.
  void add(const PagePtr& page);
  /// It is no page any longer. Whoever still has it finds it gone.
  void remove(Page& page);

  void pin(Page& page);
  void unpin(Page& page);
  /// It cannot leave for now, being prepared to; and then it can again, if nobody has pinned it.
  void begin_preparing(Page& page);
  void end_preparing(Page& page);
  /// Another thread frees it, and will tell: until then it is nobody's victim.
  void being_freed(Page& page);
  /// The page that should leave first, where `known` by next use; nullptr: none can. With `others_too` one
  /// that another thread prepares already. Those with Page::leaves_last are chosen when there is no other.
  Page* victim(bool known, bool others_too);
  /// The same, but none of `spared`, which were used last of all.
  Page* victim_but(c10::ArrayRef<PagePtr> spared, bool known, bool others_too);

  /// An instruction may need so many pages at once, and where addresses stay would never end if one pushed
  /// out another.
  static constexpr std::size_t kTogether = 8;
  /// Where addresses stay: of the pages that are pinned by operators only, the one that has been in memory
  /// for longest, which the operator has most likely used already; nullptr if so few are left that an
  /// instruction might need them all at once. None of `spared`.
  Page* pinned_victim(c10::ArrayRef<PagePtr> spared = {}) const;
  /// A device is at work with its frames: it is pinned until all that are so are tried once more.
  void busy(Page& page);
  /// False: there is none.
  bool retry_busy();

  /// Its bytes have become inaccessible, or accessible; in between they are counted already.
  void left(Page& page);
  void coming(Page& page);
  void came(Page& page);
  void stayed_away(Page& page);
  /// It is at `data` from now on, or no longer where it was: for pages whose address does not stay.
  void place(Page& page, const void* data);
  void unplace(const Page& page);

  /// A storage that is no page is in use by a running operator, and its memory may not be taken away.
  void use_unknown(const void* data) { ++unknown_[data]; }
  void unuse_unknown(const void* data);

  const std::vector<PagePtr>& pages() const { return pages_; }
  /// A page may leave, and nothing prepares it to.
  static bool is_victim(const Page& page) { return Victims::has(page); }
  /// Its next use has become another.
  void next_use_changed(Page& page) { victims_of(page).changed(page); }
  /// From now on the learner knows it.
  void learned(Page& page);
  /// Of pages in memory that the learner knows.
  std::uint64_t learned_bytes() const { return learned_bytes_; }
  /// Of pages in memory.
  std::uint64_t memory_bytes() const { return memory_bytes_; }
  /// Of these, of pages without a pin.
  std::uint64_t evictable_bytes() const { return evictable_bytes_; }

 private:
  void count(const Page& page, bool there);
  void count_away(const Page& page, bool away);
  void may_leave_again(Page& page);
  Victims& victims_of(const Page& page) { return page.leaves_last ? last_victims_ : victims_; }
  void list_pinned(Page& page);
  void unlist_pinned(Page& page);

  Memory& memory_;
  StepLearner& learner_;  ///< hears of deaths
  std::vector<PagePtr> pages_;
  boost::unordered_flat_map<const void*, Page*> by_data_;          ///< pages in memory
  boost::unordered_flat_map<const void*, std::uint32_t> unknown_;  ///< and how many operators use it
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
