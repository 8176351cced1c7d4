#pragma once

#include <c10/core/StorageImpl.h>

#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "page/memory.h"
#include "page/page.h"

namespace reef {

/// All pages, found by storage or by address, and the sums over them. Not thread-safe.
class PageTable {
 public:
  /// nullptr if the storage is no page.
  Page* find(c10::StorageImpl& storage);
  Page* at(const void* data) const;
  /// Makes a page of `storage`; nullptr if it can be none: too small, not of the memory's allocator, shared.
  Page* add(c10::StorageImpl& storage);
  /// The page is none any longer; the object goes with its last pin.
  void remove(Page& page);

  void pin(Page& page);
  void unpin(Page& page);

  /// The page's memory is gone: its storage has `page` for a context, and throws when accessed.
  void leave(Page& page, c10::StorageImpl& storage);
  /// `block` is the page's while its bytes are on their way in; then its storage's, or nobody's.
  void take_block(Page& page, c10::DataPtr block);
  void come(Page& page, c10::StorageImpl& storage);
  void give_up_block(Page& page);

  const std::vector<std::unique_ptr<Page>>& pages() const { return pages_; }
  /// Of pages in memory.
  std::uint64_t memory_bytes() const { return memory_bytes_; }
  /// Of these, of pages without a pin.
  std::uint64_t evictable_bytes() const { return evictable_bytes_; }

  /// Called with a page whose storage died while it was away.
  using StorageDied = void (*)(void* page);
  PageTable(Memory& memory, StorageDied storage_died, StepLearner& learner)
      : memory_(memory),
        storage_died_(storage_died),
        learner_(learner),
        away_counter_("bytes away (" + memory.device().str() + ")") {}

 private:
  void count(const Page& page, bool there);
  void count_away(const Page& page, bool away);

  Memory& memory_;
  StorageDied storage_died_;
  StepLearner& learner_;  ///< hears of deaths
  std::vector<std::unique_ptr<Page>> pages_;
  boost::unordered_flat_map<const void*, Page*> by_data_;  ///< pages in memory
  std::uint64_t memory_bytes_ = 0;
  std::uint64_t evictable_bytes_ = 0;
  std::uint64_t away_bytes_ = 0;
  const std::string away_counter_;
};

/// Whether `storage` still holds the page's memory alone and may lose it.
bool may_leave(const Page& page, c10::StorageImpl& storage);

}  // namespace reef
