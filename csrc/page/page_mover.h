#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/FunctionRef.h>

#include <boost/intrusive/list.hpp>
#include <chrono>
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
  double waited_seconds = 0;        ///< the training thread's
};

/// Moves pages between memory and the tiers, when told to: it decides nothing. How the bytes of a page become
/// inaccessible and accessible again is a way of its own for each means: no_address.h, stable_address.h.
///
/// A page is chosen and marked under the pager's lock, copied outside it, and settled under it. Whoever finds
/// a finished transfer may settle it; settling twice does nothing. So nobody ever waits for another thread
/// but for its input and output, whatever locks of the world that thread is waiting for.
///
/// Functions that take a Decision are called with the lock, the others without it.
class PageMover {
 public:
  PageMover(std::mutex& mutex, PageTable& table, Memory& memory);
  virtual ~PageMover() = default;
  PageMover(const PageMover&) = delete;
  PageMover& operator=(const PageMover&) = delete;

  // ---- each way's own

  /// Whether a page that is away keeps its address, where whoever touches it waits for it.
  virtual bool addresses_stay() const = 0;
  /// Calls `visit` with each page that has bytes of the storage's.
  using Visit = c10::function_ref<void(Page&)>;
  virtual void pages_of(c10::StorageImpl& storage, Visit visit, const Decision&) = 0;
  /// Makes pages of a storage that has none, where it may have some, and calls `visit` with each.
  virtual void make_pages(Pager& pager, c10::StorageImpl& storage, Visit visit, Decision&) = 0;
  /// The page's memory has been freed, and whoever freed it tells.
  virtual bool is_freed(const Page& page) const = 0;
  enum class Way : std::uint8_t { kHere, kBeside };
  /// A page for which PageTable::begin_preparing() was called leaves, unless it is wanted meanwhile; kHere:
  /// returns when its memory is free. False if no tier has room. Throws what the last tier threw, if each
  /// that had room failed. In both cases it stays.
  virtual bool evict(const PagePtr& page, Way way) = 0;
  /// Memory for a page that is to come back; room for it is there. Throws what the allocator throws.
  virtual c10::DataPtr allocate(const Page& page) = 0;
  /// Whether an operator may use it, and with `writes` write it, without waiting. With the lock.
  virtual bool is_there(const Page& page, bool writes) const = 0;
  /// Until no thread is at the page's memory outside the lock.
  virtual void wait_until_alone(const Page& page, Decision& decision) = 0;
  /// No budget is in force: what is in memory need not be a page any longer.
  virtual void release(Page& page, Decision& decision) { forget(page, decision, /*freed=*/false); }
  /// No thread moves frames. With the lock, as the next.
  virtual bool at_rest() const { return true; }
  virtual void before_fork() {}
  virtual void after_fork_in_parent() {}
  virtual void after_fork_in_child() { leave_tiers_alone(); }

  // ---- the same for all

  void set_tiers(std::vector<std::shared_ptr<Tier>> tiers, const Decision&);
  const std::vector<std::shared_ptr<Tier>>& tiers(const Decision&) const { return tiers_; }

  /// A page that is away comes back into `block`. kHere: returns when it is in memory, and throws what the
  /// tier throws; then it stays away. `owner`: its storage, if the caller has a reference to it.
  void fetch(const PagePtr& page, c10::DataPtr block, Way way, c10::StorageImpl* owner = nullptr);

  /// The page that began to leave first, of those that have not left, or nullptr.
  PagePtr leaving(const Decision&) const { return leaving_.empty() ? nullptr : leaving_.front(); }
  /// What has finished leaving is gone.
  void settle_finished();
  /// Waits for the page's transfer, and settles it. Throws what a transfer into memory threw.
  void wait_for(const PagePtr& page, c10::StorageImpl* owner = nullptr);
  /// Nothing is under way with any page; those that were leaving stay.
  void settle_all() noexcept;
  /// The first transfer that is under way, or nullptr.
  std::shared_ptr<Transfer> under_way() const;
  /// The page's owner is gone, or holds other memory. `freed`: its block is being given back; true: it is
  /// being read, and is given back later.
  virtual bool forget(Page& page, Decision& decision, bool freed);

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

 protected:
  PageCopy copy_of(const Page& page, PageCopy::Direction direction, void* data) const;
  bool wanted(const Page& page) const {
    return (page.pins > 0 && !page.leaves_pinned) || page.gone || settling_all_;
  }
  /// The tiers in the order in which they are tried for the page.
  std::vector<std::shared_ptr<Tier>> tiers_for(const Page& page, const Decision&) const;
  /// Fetched too early: it comes first, and if it is still on its way then, it stays. True: there is nothing
  /// to evict.
  bool let_it_come(const PagePtr& page);
  void no_copy(Page& page);
  void has_copy(Page& page) { copies_.push_back(page); }
  bool give_up_copies(std::uint64_t bytes);
  void left(Page& page);
  void end_leaving(Page& page, Decision& decision);
  void end_coming(Page& page, Decision& decision);
  void count_out(const Page& page, const Transfer& transfer);
  void count_in(const Page& page, const Transfer& transfer);
  template <class Wait>
  void count_waiting(const Wait& wait) {
    const auto began = std::chrono::steady_clock::now();
    wait();
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - began;
    const Decision decision(mutex_);
    counts_.waited_seconds += waited.count();
  }
  /// A program that has no thread left for it copies by itself.
  static void start_or_run(Transfer& transfer);
  /// In a forked child, whose tiers are its parent's, too: what is in memory has no copy there any longer.
  void leave_tiers_alone();

  std::mutex& mutex_;
  PageTable& table_;
  Memory& memory_;
  std::vector<std::shared_ptr<Tier>> tiers_;
  std::vector<PagePtr> leaving_;  ///< in the order in which they started
  std::vector<PagePtr> coming_;
  MoveCounts counts_;

 private:
  virtual void settle_leaving(const PagePtr& page, const std::shared_ptr<Transfer>& transfer) = 0;
  virtual void settle_coming(const PagePtr& page, const std::shared_ptr<Transfer>& transfer,
                             c10::StorageImpl* owner) = 0;

  struct Speed {
    void measured(const Page& page, const Transfer& transfer);
    double bytes = 0;
    double seconds = 0;
  };
  using Copies = boost::intrusive::list<
      Page, boost::intrusive::member_hook<Page, boost::intrusive::list_member_hook<>, &Page::copies>>;

  void settle(const PagePtr& page, const std::shared_ptr<Transfer>& transfer, c10::StorageImpl* owner);

  Copies copies_;  ///< the last that came back is the last
  bool settling_all_ = false;
  std::exception_ptr error_;
  std::uint64_t evicted_bytes_ = 0;
  Speed out_speed_;
  Speed in_speed_;
  const std::string out_counter_;
  const std::string in_counter_;
};

}  // namespace reef
