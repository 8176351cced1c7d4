#pragma once

#include <c10/core/Allocator.h>

#include <condition_variable>
#include <cstdint>

#include "page/page_way.h"

namespace reef {

/// Pages that lose their address when they are evicted. Such a page is the memory of one storage. While it is
/// away, the storage keeps its size, has a null data pointer that owns the page, and throws when it is asked
/// for its memory. This works with any memory and any kernel. The memory stays accessible while it is written
/// to a tier, so it is compared with the tier's copy before it leaves, to detect writes in between.
class NoAddress final : public PageWay {
 public:
  using PageWay::PageWay;

  void pages_of(c10::StorageImpl& storage, Visit visit, const Decision&) override;
  void make_pages(Pager& pager, c10::StorageImpl& storage, Visit visit, Decision&) override;
  bool addresses_stay() const override { return false; }
  bool is_freed(const Page& page) const override { return page.storage.expired(); }
  bool is_there(const Page& page, bool writes) const override;
  /// Returns when no thread hashes the page.
  void wait_until_alone(const Page& page, Decision& decision) override {
    decision.wait(hashed_, [&] { return !page.being_hashed; });
  }
  /// Whether no page is being hashed. Called with the lock held.
  bool at_rest() const { return hashing_ == 0; }
  c10::DataPtr allocate(const Page& page) override;
  c10::DataPtr take_kept(Page&) override { return {}; }
  Place take_place(const Page& page, Tier& tier) override;
  bool forget(Page& page, Decision& decision, bool freed) override;
  void release(Page& page, Decision& decision) override { forget(page, decision, /*freed=*/false); }

  bool must_be_written(const PagePtr& page) override;
  PageCopy copy_out(const PagePtr& page, const Decision&) override;
  PageCopy copy_in(const PagePtr& page, const Decision&) override;
  void settle_leaving(const PagePtr& page, Transfer& transfer) override;
  void settle_coming(const PagePtr& page, Transfer& transfer, c10::StorageImpl* owner) override;

 private:
  bool leave_clean(const PagePtr& page);
  void take_away(Page& page, c10::StorageImpl& owner, Decision& decision);
  bool ends_otherwise(Page& page, Transfer& transfer, Decision& decision);
  bool another_hashes(const Page& page, Decision& decision);
  void begin_hashing(Page& page, const Decision&);
  bool is_in_slot(Page& page, const PageCopy& copy, std::optional<std::uint64_t> hash);

  std::condition_variable hashed_;  ///< notified when the hashing of a page has ended
  std::uint32_t hashing_ = 0;       ///< how many pages are being hashed
};

/// Returns the page whose bytes are away and that this data pointer owns, or nullptr.
Page* page_behind(const c10::DataPtr& block);

}  // namespace reef
