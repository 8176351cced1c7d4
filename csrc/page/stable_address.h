#pragma once

#include <c10/core/Allocator.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <vector>

#include "page/page_heap.h"
#include "page/page_mover.h"
#include "userfault/frame_pool.h"
#include "userfault/userfault.h"

namespace reef {

/// Pages that keep their address: a page is a range of addresses, whose frames go. Whoever touches it
/// meanwhile waits until it is back (pager_faults.cpp). The frames are taken out of reach before they are
/// written, so that nothing is written unseen between the copy and the loss of the memory.
///
/// Blocks that were allocated before the budget are watched in place; only frames that such a block fills can
/// leave.
class StableAddressMover final : public PageMover {
 public:
  /// Throws std::system_error if the process may not have faults handled so, or has no room for `bytes` of
  /// addresses.
  StableAddressMover(std::mutex& mutex, PageTable& table, Memory& memory, FaultAccess access,
                     std::uint64_t address_bytes);

  bool addresses_stay() const override { return true; }
  void pages_of(c10::StorageImpl& storage, Visit visit, const Decision&) override;
  void make_pages(Pager& pager, c10::StorageImpl& storage, Visit visit, Decision&) override;
  bool is_freed(const Page& page) const override { return page.gone; }
  bool is_there(const Page& page, bool writes) const override;
  bool evict(const PagePtr& page, Way way) override;
  c10::DataPtr allocate(const Page& page) override;
  /// Until nobody moves its frames.
  void wait_until_alone(const Page& page, Decision& decision) override {
    decision.wait(moved_, [&] { return !page.being_moved; });
  }
  bool forget(Page& page, Decision& decision, bool freed) override;
  void release(Page& page, Decision& decision) override;
  bool at_rest() const override { return moving_ == 0; }
  void before_fork() override { frames_.before_fork(); }
  void after_fork_in_parent() override { frames_.after_fork_in_parent(); }
  void after_fork_in_child() override;

  // ---- blocks of its own

  FaultAccess access() const { return faults_.access(); }
  FramePool& frames() { return frames_; }
  UserFault& faults() { return faults_; }
  PageHeap& heap(const Decision&) { return heap_; }
  /// Pages of other allocators' blocks are so large, at most.
  void set_chunk_bytes(std::uint64_t bytes, const Decision&) { chunk_bytes_ = bytes; }
  /// How the memory of a new block is there: its bytes count as alive unless it is away.
  enum class Contents : std::uint8_t { kFrames, kUntouched, kAway };
  /// Makes the pages of `bytes` at `data`, of the pool's addresses, and calls `visit` with each.
  /// A page has `chunk_bytes`, or a 256th of the block.
  PageHeap::Block make_block(Pager& pager, void* data, std::uint64_t bytes, std::uint64_t chunk_bytes,
                             Contents contents, Visit visit, Decision&);
  /// Gives the page frames if it has been waiting to be touched.
  void touch(Page& page);
  /// The block at `data` is given back, or is no longer watched, being another allocator's. False: it is
  /// none.
  bool remove_block(const void* data, bool foreign, Decision& decision);

 private:
  void settle_leaving(const PagePtr& page, const std::shared_ptr<Transfer>& transfer) override;
  void settle_coming(const PagePtr& page, const std::shared_ptr<Transfer>& transfer,
                     c10::StorageImpl* owner) override;

  c10::DataPtr detach(Page& page);
  void attach(Page& page, c10::DataPtr frames);
  void moving(Page& page);
  void not_moved(Page& page);
  void stays(Page& page, c10::DataPtr frames);
  void leave(Page& page, c10::DataPtr frames, Decision& decision);
  std::shared_ptr<Transfer> write(const PagePtr& page, const std::shared_ptr<Tier>& tier,
                                  c10::DataPtr& frames, Way way);
  bool begin_moving(Page& page);
  void leave_ledger(Page& page);

  UserFault faults_;
  FramePool frames_;
  PageHeap heap_;
  std::uint64_t chunk_bytes_ = 0;
  std::uint32_t moving_ = 0;       ///< pages that are being moved
  std::condition_variable moved_;  ///< a page's frames are not being moved any longer
};

}  // namespace reef
