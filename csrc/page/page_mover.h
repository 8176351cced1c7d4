#pragma once

#include <c10/core/StorageImpl.h>

#include <atomic>
#include <boost/intrusive/list.hpp>
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
  std::uint64_t unannounced = 0;    ///< pages that were touched while they were away, without an operator
  std::uint64_t oversized = 0;      ///< operators whose pages did not fit, and came when they were touched
  double waited_seconds = 0;        ///< the training thread's
  double unannounced_seconds = 0;   ///< theirs
};

/// Moves pages between memory and the tiers, when told to: it decides nothing. How the bytes of a page become
/// inaccessible and accessible again is its way's (page_way.h).
///
/// A page is chosen and marked under the pager's lock, copied outside it, and settled under it. Whoever finds
/// a finished transfer may settle it; settling twice does nothing. So nobody ever waits for another thread
/// but for its input and output, whatever locks of the world that thread is waiting for.
///
/// Functions that take a Decision are called with the lock, the others without it.
class PageMover {
 public:
  PageMover(std::mutex& mutex, PageTable& table, Memory& memory);
  PageMover(const PageMover&) = delete;
  PageMover& operator=(const PageMover&) = delete;

  void set_tiers(std::vector<std::shared_ptr<Tier>> tiers, const Decision&);
  /// Lets go of the tiers; pages that are away keep theirs. To be dropped by the caller outside the lock: a
  /// tier may wait for a device before it gives its memory back.
  std::vector<std::shared_ptr<Tier>> take_tiers(const Decision&) { return std::exchange(tiers_, {}); }
  const std::vector<std::shared_ptr<Tier>>& tiers(const Decision&) const { return tiers_; }

  enum class Way : std::uint8_t { kHere, kBeside };
  /// Evicts a page for which PageTable::begin_preparing() was called, unless it is wanted meanwhile. With
  /// kHere it returns when the page's memory is free. Returns false if no tier has room. Throws what the last
  /// tier threw if each tier with room failed. In both cases the page stays.
  bool evict(const PagePtr& page, Way way);
  /// Brings a page that is away back into `block`. With kHere it returns when the page is in memory, and
  /// throws what the tier throws; the page stays away then. Subtracts the page's bytes from `reserved_bytes`
  /// as soon as they count as alive. `owner`: the page's storage, if the caller has a reference to it.
  void fetch(const PagePtr& page, c10::DataPtr block, std::atomic<std::uint64_t>& reserved_bytes, Way way,
             c10::StorageImpl* owner = nullptr);

  /// The page that began to leave first, of those that have not left, or nullptr.
  PagePtr leaving(const Decision&) const { return leaving_.empty() ? nullptr : leaving_.front(); }
  /// Settles the transfers of pages that have finished leaving.
  void settle_finished();
  /// Waits for the page's transfer, and settles it. Throws what a transfer into memory threw.
  void wait_for(const PagePtr& page, c10::StorageImpl* owner = nullptr);
  /// Waits for all transfers. Pages that were leaving stay.
  void settle_all() noexcept;
  /// The first transfer that is under way, or nullptr. With the lock.
  std::shared_ptr<Transfer> under_way() const;
  /// Forgets the copies that pages in memory have in tiers: in a forked child those are the parent's.
  void leave_tiers_alone();

  /// Gives the page's room in its tier back.
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

  // ---- for the ways, with the lock

  /// Whether a page that is to leave must stay after all.
  bool wanted(const Page& page) const {
    return (page.pins > 0 && !page.leaves_pinned) || page.gone || settling_all_;
  }
  /// Notes that the page has left memory: its bytes are in the tier, unless it never held any.
  void left(Page& page);
  /// Notes that a page that was being written by `transfer` has left, or stays in memory.
  void left(Page& page, const Transfer& transfer, Decision& decision);
  void stayed(Page& page, const Transfer& transfer, Decision& decision);
  /// Notes that a page that was being read by `transfer` is in memory, with the same bytes as in the tier.
  void came(Page& page, const Transfer& transfer, Decision& decision);
  /// Whether the page does not come, because the transfer failed or the page is gone. Then drops its block.
  bool stays_away(Page& page, const Transfer& transfer, Decision& decision);
  /// Drops the page's transfer, and leaves its state as it is.
  void end_transfer(Page& page, Decision& decision);

 private:
  friend class PageWay;

  enum class Begun : std::uint8_t { kYes, kNoRoom, kStays };
  Begun begin_leaving(const PagePtr& page, const std::shared_ptr<Tier>& tier, Way way,
                      std::shared_ptr<Transfer>& transfer);
  /// The tiers in the order in which they are tried for the page.
  std::vector<std::shared_ptr<Tier>> tiers_for(const Page& page, const Decision&) const;
  /// Fetched too early: it comes first, and if it is still on its way then, it stays. True: there is nothing
  /// to evict.
  bool let_it_come(const PagePtr& page);
  void no_copy(Page& page);
  bool give_up_copies(std::uint64_t bytes);
  void count_out(const Page& page, const Transfer& transfer);
  template <class Wait>
  void count_waiting(const Wait& wait);
  /// A program that has no thread left for it copies by itself.
  static void start_or_run(Transfer& transfer);
  void settle(const PagePtr& page, Transfer& transfer, c10::StorageImpl* owner);

  struct Speed {
    void measured(const Page& page, const Transfer& transfer);
    double bytes = 0;
    double seconds = 0;
  };
  using Copies = boost::intrusive::list<
      Page, boost::intrusive::member_hook<Page, boost::intrusive::list_member_hook<>, &Page::copies>>;

  std::mutex& mutex_;
  PageTable& table_;
  Memory& memory_;
  std::vector<std::shared_ptr<Tier>> tiers_;
  std::vector<PagePtr> leaving_;  ///< in the order in which they started
  std::vector<PagePtr> coming_;
  Copies copies_;  ///< the last that came back is the last
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
