#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/FunctionRef.h>

#include <mutex>
#include <optional>

#include "page/decision.h"
#include "page/memory.h"
#include "page/page.h"
#include "page/page_table.h"

namespace reef {

class PageMover;

/// How the bytes of pages become inaccessible, and accessible again: no_address.h, stable_address.h. A page
/// has one way for life; the mover, which all ways share, does what is the same for all.
///
/// Functions that take a Decision are called with the pager's lock, the others without it.
class PageWay {
 public:
  explicit PageWay(PageMover& mover);
  virtual ~PageWay() = default;
  PageWay(const PageWay&) = delete;
  PageWay& operator=(const PageWay&) = delete;

  /// Calls `visit` with each page that has bytes of the storage's.
  using Visit = c10::function_ref<void(Page&)>;
  virtual void pages_of(c10::StorageImpl& storage, Visit visit, const Decision&) = 0;
  /// Makes pages of a storage that has none, where it may have some, and calls `visit` with each.
  virtual void make_pages(Pager& pager, c10::StorageImpl& storage, Visit visit, Decision&) = 0;
  /// Whether a page that is away keeps its address, where whoever touches it waits for it.
  virtual bool addresses_stay() const = 0;
  /// The page's memory has been freed, and whoever freed it tells. With the lock.
  virtual bool is_freed(const Page& page) const = 0;
  /// Whether an operator may use it, and with `writes` write it, without waiting. With the lock.
  virtual bool is_there(const Page& page, bool writes) const = 0;
  /// Until no thread is at the page's memory outside the lock.
  virtual void wait_until_alone(const Page& page, Decision& decision) = 0;
  /// Memory for a page that is to come back; room for it is there. Throws what the allocator throws. Empty:
  /// it has been kept.
  virtual c10::DataPtr allocate(const Page& page) = 0;
  /// What Page::kept is of is alive again. With the lock.
  virtual c10::DataPtr take_kept(Page& page) = 0;
  /// Room in the tier for a page that is to leave, if it has any.
  struct Place {
    std::optional<Tier::Slot> slot;
    bool kept = false;  ///< it counts the bytes, whose memory is kept
  };
  virtual Place take_place(const Page& page, Tier& tier) = 0;
  /// The page's owner is gone, or holds other memory. `freed`: its block is being given back; true: it is
  /// being read, and is given back later.
  virtual bool forget(Page& page, Decision& decision, bool freed) = 0;
  /// No budget is in force: what is in memory need not be a page any longer.
  virtual void release(Page& page, Decision& decision) = 0;

  // ---- for the mover

  /// Whether the page, which is being prepared to leave, must be written for that; with its state as it is,
  /// begin_leaving() of the mover is next. False: it has left already, or stays, and the table knows.
  virtual bool must_be_written(const PagePtr& page) = 0;
  /// What is to be read of it, and when.
  virtual PageCopy copy_out(const PagePtr& page, const Decision&) = 0;
  virtual PageCopy copy_in(const PagePtr& page, const Decision&) = 0;
  /// A transfer of the page's has ended. Does nothing if it has been settled already.
  virtual void settle_leaving(const PagePtr& page, Transfer& transfer) = 0;
  /// `owner`: the page's storage, if the caller has a reference to it.
  virtual void settle_coming(const PagePtr& page, Transfer& transfer, c10::StorageImpl* owner) = 0;

 protected:
  PageMover& mover_;
  std::mutex& mutex_;
  PageTable& table_;
  Memory& memory_;
};

}  // namespace reef
