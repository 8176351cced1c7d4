#pragma once

#include <c10/core/StorageImpl.h>

#include <boost/intrusive/list.hpp>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "page/decision.h"
#include "page/memory.h"
#include "page/page_table.h"
#include "page/residency.h"
#include "reef/swap.h"
#include "reef/tier.h"

namespace reef {

struct MoveCounts {
  std::uint64_t faults = 0;   ///< operators that had to wait for a page
  std::uint64_t fetches = 0;  ///< pages brought back ahead of their operator
  std::uint64_t evictions = 0;
  std::uint64_t clean_evictions = 0;  ///< of these, without writing
  std::uint64_t bytes_in = 0;
  std::uint64_t bytes_out = 0;
  std::uint64_t unseen_writes = 0;  ///< pages found written without an operator
  double waited_seconds = 0;        ///< the training thread's
};

/// Moves pages between memory and the tiers, when told to: it decides nothing.
///
/// A page is chosen and marked under the pager's lock, copied outside it, and settled under it. Whoever finds
/// a finished transfer may settle it; settling twice does nothing. So nobody ever waits for another thread
/// but for its input and output, whatever locks of the world that thread is waiting for.
///
/// Functions that take a Decision are called with the lock, the others without it.
class PageMover {
 public:
  PageMover(std::mutex& mutex, PageTable& table, Memory& memory, Residency& residency);

  void set_tiers(std::vector<std::shared_ptr<Tier>> tiers, const Decision&);
  const std::vector<std::shared_ptr<Tier>>& tiers(const Decision&) const { return tiers_; }

  enum class Way : std::uint8_t { kHere, kBeside };
  /// A page for which PageTable::begin_preparing() was called leaves, unless it is wanted meanwhile; kHere:
  /// returns when its memory is free. False if no tier has room. Throws what the last tier threw, if each
  /// that had room failed. In both cases it stays.
  bool evict(const PagePtr& page, Way way);
  /// Memory for a page that is to come back; room for it is there. Throws what the allocator throws.
  c10::DataPtr allocate(const Page& page);
  /// A page that is away comes back into `block`. kHere: returns when it is in memory, and throws what the
  /// tier throws; then it stays away. `owner`: its storage, if the caller has a reference to it.
  void fetch(const PagePtr& page, c10::DataPtr block, Way way, c10::StorageImpl* owner = nullptr);

  /// The page that began to leave first, of those that have not left, or nullptr.
  PagePtr leaving(const Decision&) const { return leaving_.empty() ? nullptr : leaving_.front(); }
  /// What has finished leaving is gone.
  void settle_finished();
  /// Waits for the page's transfer, and settles it. Throws what a transfer into memory threw.
  void wait_for(const PagePtr& page, c10::StorageImpl* owner = nullptr);
  /// Until no thread reads the page's memory to see whether it has changed.
  void wait_for_hash(const Page& page, Decision& decision) {
    decision.wait(hashed_, [&] { return !page.being_hashed; });
  }
  /// Nothing is under way with any page; those that were leaving stay.
  void settle_all() noexcept;
  /// The first transfer that is under way, or nullptr.
  std::shared_ptr<Transfer> under_way() const;
  /// In a forked child, whose tiers are its parent's, too: what is in memory has no copy there any longer.
  void leave_tiers_alone();

  /// The page's storage is gone, or holds other memory. `freed`: its block is being given back; true: it is
  /// being read, and is given back later.
  bool forget(Page& page, Decision& decision, bool freed);

  /// The tier may have the room of the page's bytes again.
  void drop_slot(Page& page, Decision& decision);

  /// The first error of a move beside the operators of which nobody has been told, or nullptr.
  std::exception_ptr take_error(const Decision&) { return std::exchange(error_, nullptr); }
  void keep_error(std::exception_ptr error, const Decision&) {
    if (!error_) error_ = std::move(error);
  }

  /// Of all pages that have left, ever.
  std::uint64_t evicted_bytes(const Decision&) const { return evicted_bytes_; }
  MoveCounts& counts(const Decision&) { return counts_; }
  const MoveCounts& counts(const Decision&) const { return counts_; }
  /// As measured.
  SwapSpeeds speeds(const Decision&) const;

 private:
  struct Speed {
    void measured(const Page& page, const Transfer& transfer);
    double bytes = 0;
    double seconds = 0;
  };
  using Copies = boost::intrusive::list<
      Page, boost::intrusive::member_hook<Page, boost::intrusive::list_member_hook<>, &Page::copies>>;

  PageCopy copy_of(const Page& page, PageCopy::Direction direction, void* data) const;
  bool wanted(const Page& page) const { return page.pins > 0 || page.gone || settling_all_; }
  bool may_be_written(const PagePtr& page);
  bool leave_clean(const PagePtr& page);
  std::shared_ptr<Transfer> begin_leaving(const PagePtr& page, const std::shared_ptr<Tier>& tier, Way way);
  void no_copy(Page& page);
  bool give_up_copies(std::uint64_t bytes);
  void settle(const PagePtr& page, const std::shared_ptr<Transfer>& transfer, c10::StorageImpl* owner);
  void settle_leaving(const PagePtr& page, const std::shared_ptr<Transfer>& transfer);
  void settle_coming(const PagePtr& page, const std::shared_ptr<Transfer>& transfer, c10::StorageImpl* owner);
  bool stays(Page& page, const std::shared_ptr<Transfer>& transfer, Decision& decision);
  void leave(Page& page, c10::StorageImpl& owner, Decision& decision);
  bool another_hashes(const Page& page, Decision& decision);
  std::uint64_t hash_of(Page& page);
  void end_leaving(Page& page, Decision& decision);
  void end_coming(Page& page, Decision& decision);
  template <class Wait>
  void count_waiting(const Wait& wait);
  void count_out(const Page& page, const Transfer& transfer);
  void count_in(const Page& page, const Transfer& transfer);

  std::mutex& mutex_;
  PageTable& table_;
  Memory& memory_;
  Residency& residency_;
  std::vector<std::shared_ptr<Tier>> tiers_;
  std::vector<PagePtr> leaving_;  ///< in the order in which they started
  std::vector<PagePtr> coming_;
  Copies copies_;                   ///< the last that came back is the last
  std::condition_variable hashed_;  ///< a page is not being hashed any longer
  bool settling_all_ = false;
  std::exception_ptr error_;
  MoveCounts counts_;
  std::uint64_t evicted_bytes_ = 0;
  Speed out_speed_;
  Speed in_speed_;
  const std::string out_counter_;
  const std::string in_counter_;
};

}  // namespace reef
