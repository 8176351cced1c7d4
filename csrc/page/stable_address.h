#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <vector>

#include "page/page_heap.h"
#include "page/page_sizes.h"
#include "page/page_way.h"
#include "userfault/frame_pool.h"
#include "userfault/userfault.h"

namespace reef {

/// Pages that keep their address. A page is a range of addresses, and only its frames leave; a thread that
/// touches it meanwhile waits until it is back (pager_faults.cpp). The frames are detached from their
/// addresses before they are copied, so that no write is lost between the copy and the loss of the memory.
///
/// Blocks that were allocated before the budget are watched in place; only their whole frames can leave.
///
/// Moving frames costs 22 us per MiB on the moving thread, or 1 us if frames are large. It also makes the
/// kernel interrupt every other core that runs the process, to flush its TLB, which costs a computing thread
/// 3 to 16 us.
class StableAddress final : public PageWay {
 public:
  /// Throws std::system_error if the process may not handle faults with this access, or cannot reserve
  /// `address_bytes` of addresses.
  StableAddress(PageMover& mover, FaultAccess access, std::uint64_t address_bytes);

  void pages_of(c10::StorageImpl& storage, Visit visit, const Decision&) override;
  void make_pages(Pager& pager, c10::StorageImpl& storage, Visit visit, Decision&) override;
  bool addresses_stay() const override { return true; }
  bool is_freed(const Page& page) const override { return page.gone; }
  bool is_there(const Page& page, bool writes) const override;
  /// Waits until no thread moves the page's frames.
  void wait_until_alone(const Page& page, Decision& decision) override {
    decision.wait(moved_, [&] { return !page.being_moved; });
  }
  c10::DataPtr allocate(const Page& page) override;
  c10::DataPtr take_kept(Page& page) override;
  Place take_place(const Page& page, Tier& tier) override;
  bool forget(Page& page, Decision& decision, bool freed) override;
  void release(Page& page, Decision& decision) override;

  bool must_be_written(const PagePtr& page) override;
  PageCopy copy_out(const PagePtr& page, const Decision&) override;
  PageCopy copy_in(const PagePtr& page, const Decision&) override;
  void settle_leaving(const PagePtr& page, Transfer& transfer) override;
  void settle_coming(const PagePtr& page, Transfer& transfer, c10::StorageImpl* owner) override;

  /// Whether no thread moves frames. Called with the lock held.
  bool at_rest() const { return moving_ == 0; }
  void after_fork_in_child();

  // ---- blocks of its own

  FaultAccess access() const { return faults_.access(); }
  /// The pool of frames of one size.
  FramePool& frames(std::uint64_t frame_bytes) {
    return frame_bytes == kFrameBytes ? small_frames_ : large_frames_;
  }
  bool has_address(const void* data) const {
    return small_frames_.has_address(data) || large_frames_.has_address(data);
  }
  /// Returns free frames to the system, except for `kept_bytes` and for the frames that pages which are away
  /// keep at their peak but not now, because these will be needed again.
  void trim(std::uint64_t kept_bytes);
  /// Returns all free frames to the system.
  void keep_no_frames() {
    most_away_bytes_ = away_bytes_.load();
    trim(0);
  }
  UserFault& faults() { return faults_; }
  PageHeap& heap(const Decision&) { return heap_; }
  /// Returns the sizes of pages in a budget.
  PageSizes sizes_in(std::uint64_t budget_bytes) const {
    return PageSizes::of_budget(budget_bytes, has_large_frames_);
  }
  /// Sets the sizes of pages in other allocators' blocks.
  void set_sizes(const PageSizes& sizes, const Decision&) { sizes_ = sizes; }
  /// Whether a new block has frames, gets them when it is touched (its bytes count as alive nevertheless), or
  /// has none because it begins away.
  enum class Contents : std::uint8_t { kFrames, kUntouched, kAway };
  /// Makes a block with pages for [data, data + bytes), which are addresses of a pool, and calls `visit` with
  /// each.
  PageHeap::Block make_block(Pager& pager, void* data, std::uint64_t bytes, std::uint64_t page_bytes,
                             Contents contents, Visit visit, Decision&);
  /// Gives frames to a page that is kUntouched.
  void touch(Page& page);
  /// Ends the block at `data`: its frames return to the pool or, with `foreign`, it is no longer watched.
  /// Returns false if no such block begins there.
  bool remove_block(const void* data, bool foreign, Decision& decision);

 private:
  void add_pages(PageHeap::Block& block, Pager& pager, const void* block_start, std::uint64_t begin,
                 std::uint64_t end, std::uint64_t page_bytes, Contents contents);
  FramePool& frames_for(const Page& page);
  void* detach(const PagePtr& page, Transfer& transfer);
  bool attach(Page& page, c10::DataPtr& frames);
  void end_attaching(Page& page, bool attached, c10::DataPtr frames);
  void moving(Page& page);
  void not_moved(Page& page);
  void leave_ledger(Page& page);
  void keep(Page& page);

  UserFault faults_;
  const bool has_large_frames_ = has_large_frames();
  FramePool small_frames_;
  FramePool large_frames_;
  PageHeap heap_;
  PageSizes sizes_;
  std::atomic<std::uint64_t> away_bytes_ = 0;  ///< bytes of all Page::kept
  std::atomic<std::uint64_t> most_away_bytes_ = 0;
  std::uint32_t moving_ = 0;       ///< how many pages are being moved
  std::condition_variable moved_;  ///< notified when the move of a page's frames has ended
};

}  // namespace reef
