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

/// How the bytes of pages become inaccessible, and accessible again. There are two implementations:
/// no_address.h and stable_address.h. A page keeps its way for life. The mover does what all ways share.
///
/// Functions that take a Decision are called with the pager's lock held, the others without it unless they
/// say so.
class PageWay {
 public:
  explicit PageWay(PageMover& mover);
  virtual ~PageWay() = default;
  PageWay(const PageWay&) = delete;
  PageWay& operator=(const PageWay&) = delete;

  /// Calls `visit` with each page that holds bytes of `storage`.
  using Visit = c10::function_ref<void(Page&)>;
  virtual void pages_of(c10::StorageImpl& storage, Visit visit, const Decision&) = 0;
  /// Makes pages of a storage that has none, if this way can, and calls `visit` with each.
  virtual void make_pages(Pager& pager, c10::StorageImpl& storage, Visit visit, Decision&) = 0;
  /// Whether a page keeps its address while it is away. If so, a thread that touches it waits until it is
  /// back.
  virtual bool addresses_stay() const = 0;
  /// Whether the page's memory has been freed; forget() has been called or will be. Called with the lock
  /// held.
  virtual bool is_freed(const Page& page) const = 0;
  /// Whether an operator may read the page, and with `writes` write it, without waiting. Called with the lock
  /// held.
  virtual bool is_there(const Page& page, bool writes) const = 0;
  /// Waits until no thread works on the page's memory outside the lock.
  virtual void wait_until_alone(const Page& page, Decision& decision) = 0;
  /// Allocates memory for a page that is to come back; the caller has made room. Throws what the allocator
  /// throws. Returns an empty pointer if the page's memory was kept (Page::kept).
  virtual c10::DataPtr allocate(const Page& page) = 0;
  /// Takes Page::kept, whose bytes count as alive from now on, or returns an empty pointer if there is none.
  /// Called with the lock held.
  virtual c10::DataPtr take_kept(Page& page) = 0;
  /// The room in a tier for a page that is to leave, if the tier has any.
  struct Place {
    std::optional<Tier::Slot> slot;
    bool kept = false;  ///< the tier only counts the bytes, and the page's own memory is kept
  };
  virtual Place take_place(const Page& page, Tier& tier) = 0;
  /// Ends a page whose owner is gone or holds other memory. `freed` says that its block is being freed.
  /// Returns true if the block is being read and must be freed later.
  virtual bool forget(Page& page, Decision& decision, bool freed) = 0;
  /// Ends the page if it is in memory, because no budget is in force.
  virtual void release(Page& page, Decision& decision) = 0;

  // ---- for the mover

  /// Returns whether a page that is being prepared to leave must be written to a tier. If not, it has left
  /// already or stays, and the table has been updated.
  virtual bool must_be_written(const PagePtr& page) = 0;
  /// Describe the transfer of a page to `page->slot`, or from there.
  virtual PageCopy copy_out(const PagePtr& page, const Decision&) = 0;
  virtual PageCopy copy_in(const PagePtr& page, const Decision&) = 0;
  /// Settles a transfer that has ended. Does nothing if another thread has settled it already.
  virtual void settle_leaving(const PagePtr& page, Transfer& transfer) = 0;
  /// `owner` is the page's storage if the caller has a reference to it, otherwise nullptr.
  virtual void settle_coming(const PagePtr& page, Transfer& transfer, c10::StorageImpl* owner) = 0;

 protected:
  PageMover& mover_;
  std::mutex& mutex_;
  PageTable& table_;
  Memory& memory_;
};

}  // namespace reef
