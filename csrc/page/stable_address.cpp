#include "page/stable_address.h"

#include <algorithm>
#include <exception>
#include <new>
#include <optional>
#include <system_error>
#include <utility>

#include "high_water.h"
#include "ledger/blocks.h"
#include "ledger/counting_allocator.h"
#include "page/page_mover.h"
#include "page/pager.h"
#include "round_up.h"

namespace reef {
namespace {

// The most blocks of other allocators. Each takes up to two of the 65,530 mappings that a process may have.
constexpr std::size_t kMostForeign = 12000;

// A page's frames that have been moved away from its addresses. `bytes` of them count as alive while this
// exists.
struct DetachedFrames {
  FramePool& pool;
  FramePool::Frames frames;
  std::int64_t bytes;
};

void drop_frames(void* context) {
  const std::unique_ptr<DetachedFrames> block(static_cast<DetachedFrames*>(context));
  block->pool.keep(block->frames);
  count_alive(-block->bytes);
}

c10::DataPtr frames_of(FramePool& pool, FramePool::Frames frames, const Page& page) {
  auto* const block = new DetachedFrames{pool, frames, static_cast<std::int64_t>(page.bytes)};
  return {frames.data, block, &drop_frames, c10::Device(c10::kCPU)};
}

// Sets how many bytes of detached frames count as alive.
void count(const c10::DataPtr& frames, std::uint64_t bytes) {
  auto* const block = static_cast<DetachedFrames*>(frames.get_context());
  count_alive(static_cast<std::int64_t>(bytes) - block->bytes);
  block->bytes = static_cast<std::int64_t>(bytes);
}

// Ignores errors: a thread that waits for the page settles the transfer again, and gets the error.
template <class Settle>
TransferLane::Ended settled_at_once(Settle settle) {
  return [settle](Transfer& transfer) {
    try {
      settle(transfer);
    } catch (...) {
    }
  };
}

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

// Returns the range of another allocator's block that is watched.
std::pair<void*, std::uint64_t> watched(const c10::SmallVector<PagePtr, 1>& pages) {
  const auto* const begin = static_cast<const char*>(pages.front()->data);
  const auto* const end = static_cast<const char*>(pages.back()->data) + pages.back()->frame_bytes;
  return {const_cast<char*>(begin), static_cast<std::uint64_t>(end - begin)};
}

}  // namespace

StableAddress::StableAddress(PageMover& mover, FaultAccess access, std::uint64_t address_bytes)
    : PageWay(mover),
      faults_(access),
      small_frames_(faults_, address_bytes),
      large_frames_(faults_, address_bytes, kLargeFrameBytes) {}

// Other allocators' blocks have small frames.
FramePool& StableAddress::frames_for(const Page& page) {
  return large_frames_.has_address(page.data) ? large_frames_ : small_frames_;
}

// Trims the pool that keeps more frames first.
void StableAddress::trim(std::uint64_t kept_bytes) {
  kept_bytes += most_away_bytes_ - away_bytes_;
  FramePool* more = &small_frames_;
  FramePool* less = &large_frames_;
  if (more->kept_bytes() < less->kept_bytes()) std::swap(more, less);
  more->trim(kept_bytes - std::min(kept_bytes, less->kept_bytes()));
  less->trim(kept_bytes - std::min(kept_bytes, more->kept_bytes()));
}

// ---- pages of storages

void StableAddress::pages_of(c10::StorageImpl& storage, Visit visit, const Decision&) {
  const void* const data = storage._mutable_data_ptr_no_checks().get();
  if (data != nullptr && storage.nbytes() > 0) heap_.pages_of(data, storage.nbytes(), visit);
}

// Makes pages of a block of LibTorch's allocator, which reports when the block is freed. The first and the
// last bytes may share frames with other memory, so they are not part of any page.
void StableAddress::make_pages(Pager& pager, c10::StorageImpl& storage, Visit visit, Decision&) {
  const c10::DataPtr& owned = storage._mutable_data_ptr_no_checks();
  void* const data = owned.get();
  const std::uint64_t begin = round_up(reinterpret_cast<std::uint64_t>(data), kFrameBytes);
  const std::uint64_t end =
      (reinterpret_cast<std::uint64_t>(data) + storage.nbytes()) / kFrameBytes * kFrameBytes;
  if (data == nullptr || owned.get_context() != data || begin >= end || heap_.find(data) != nullptr) return;
  if (storage.device() != memory_.device() || heap_.foreign_count() >= kMostForeign ||
      !memory_.counts(storage))
    return;
  try {
    if (!populate(pointer(begin), end - begin)) return;
    faults_.watch(pointer(begin), end - begin);
  } catch (const std::system_error&) {  // Another userfaultfd watches it, or there are too many mappings.
    return;
  }
  PageHeap::Block block{storage.nbytes(), true, {}};
  add_pages(block, pager, data, begin, end, sizes_.page_bytes(end - begin, kFrameBytes), Contents::kFrames);
  for (const PagePtr& page : block.pages) visit(*page);
  heap_.add(data, std::move(block));
}

void StableAddress::add_pages(PageHeap::Block& block, Pager& pager, const void* block_start,
                              std::uint64_t begin, std::uint64_t end, std::uint64_t page_bytes,
                              Contents contents) {
  for (std::uint64_t start = begin; start < end; start += page_bytes) {
    const PagePtr page(new Page(pager, *this));
    page->data = pointer(start);
    page->block_start = block_start;
    page->bytes = std::min(page_bytes, end - start);
    page->frame_bytes = frames_for(*page).whole(page->bytes);
    page->state = contents == Contents::kAway ? PageState::kAway : PageState::kResident;
    page->counted_away = contents == Contents::kAway;
    page->untouched = contents == Contents::kUntouched;
    table_.add(page);
    block.pages.push_back(page);
  }
}

PageHeap::Block StableAddress::make_block(Pager& pager, void* data, std::uint64_t bytes,
                                          std::uint64_t page_bytes, Contents contents, Visit visit,
                                          Decision&) {
  PageHeap::Block block{bytes, false, {}};
  const auto begin = reinterpret_cast<std::uint64_t>(data);
  add_pages(block, pager, data, begin, begin + bytes, page_bytes, contents);
  for (const PagePtr& page : block.pages) visit(*page);
  if (contents != Contents::kAway) count_alive(static_cast<std::int64_t>(bytes));
  return block;
}

void StableAddress::touch(Page& page) {
  {
    Decision decision(mutex_);
    wait_until_alone(page, decision);
    if (page.gone || !page.untouched) return;
    moving(page);
  }
  std::exception_ptr failed;
  try {
    FramePool& pool = frames_for(page);
    const FramePool::Frames frames = pool.take(page.frame_bytes);
    if (!pool.move_in(frames, const_cast<void*>(page.data))) {
      pool.keep(frames);
      throw std::bad_alloc();
    }
  } catch (...) {
    failed = std::current_exception();
  }
  {
    const Decision decision(mutex_);
    page.untouched = failed != nullptr;
    not_moved(page);
  }
  if (failed) std::rethrow_exception(failed);
}

bool StableAddress::remove_block(const void* data, bool foreign, Decision& decision) {
  const auto find = [&] {
    const PageHeap::Block* const block = heap_.find(data);
    return block != nullptr && block->foreign == foreign ? block : nullptr;
  };
  if (find() == nullptr) return false;
  // Meanwhile, a thread that ends the budget may remove the block.
  decision.wait(moved_, [&] {
    const PageHeap::Block* const block = find();
    return block == nullptr || std::none_of(block->pages.begin(), block->pages.end(),
                                            [](const PagePtr& page) { return page->being_moved; });
  });
  if (find() == nullptr) return true;
  const auto gone = heap_.remove(data);
  if (gone.empty()) return true;
  for (const PagePtr& page : gone) {
    const bool leaving = page->state == PageState::kLeaving && !page->block;  // The copy has not begun.
    const bool there = leaving || page->state == PageState::kResident || page->state == PageState::kClean;
    forget(*page, decision, /*freed=*/true);
    if (foreign) continue;
    if (there) count_alive(-static_cast<std::int64_t>(page->bytes));
    FramePool& pool = frames_for(*page);
    if (there && !page->untouched) {
      pool.keep({const_cast<void*>(page->data), page->frame_bytes});
    } else {
      pool.give_up_addresses(page->data, page->frame_bytes);
    }
  }
  if (foreign) {
    const auto [begin, bytes] = watched(gone);
    faults_.unwatch(begin, bytes);
  }
  return true;
}

void StableAddress::release(Page& page, Decision& decision) {
  const PageHeap::Block* const block = heap_.find(page.block_start);
  if (block == nullptr || !block->foreign) return;
  const bool in_use = std::any_of(block->pages.begin(), block->pages.end(), [&](const PagePtr& one) {
    return one->holds > 0 || !is_there(*one, false);
  });
  if (!in_use) remove_block(page.block_start, /*foreign=*/true, decision);
}

// A page in transfer is dropped when the transfer is settled.
bool StableAddress::forget(Page& page, Decision& decision, bool) {
  if (page.gone) return false;
  const PagePtr keep(&page);
  if (page.state == PageState::kLeaving && page.block) leave_ledger(page);
  table_.remove(page);
  if (page.transfer != nullptr && !page.transfer->cancel() && !page.transfer->done()) return false;
  if (page.transfer != nullptr) mover_.end_transfer(page, decision);
  mover_.drop_slot(page, decision);
  decision.drop(std::exchange(page.block, {}));
  if (page.kept) {
    away_bytes_ -= page.frame_bytes;
    decision.drop(std::exchange(page.kept, {}));
  }
  return false;
}

bool StableAddress::is_there(const Page& page, bool) const {
  return !page.being_moved && (page.state == PageState::kResident || page.state == PageState::kClean);
}

void StableAddress::leave_ledger(Page& page) {
  heap_.leave(page, [](const void* data, std::uint64_t bytes) {
    Blocks::instance().grow(data, -static_cast<std::int64_t>(bytes));
  });
}

// ---- frames

// moving() and not_moved() are called with the lock held.
void StableAddress::moving(Page& page) {
  page.being_moved = true;
  ++moving_;
}

void StableAddress::not_moved(Page& page) {
  --moving_;
  page.being_moved = false;
  moved_.notify_all();
}

// Moves the page's frames away from its addresses. Returns nullptr if the page stays.
void* StableAddress::detach(const PagePtr& page, Transfer& transfer) {
  {
    const Decision decision(mutex_);
    transfer.cancelled = mover_.wanted(*page);
    if (transfer.cancelled) return nullptr;
    moving(*page);
  }
  std::optional<FramePool::Frames> frames;
  std::exception_ptr failed;
  try {
    frames = frames_for(*page).move_out(const_cast<void*>(page->data), page->frame_bytes);
  } catch (...) {
    failed = std::current_exception();
  }
  const Decision decision(mutex_);
  not_moved(*page);
  if (failed) std::rethrow_exception(failed);
  transfer.cancelled = transfer.busy = !frames;
  if (!frames) return nullptr;
  page->block = frames_of(frames_for(*page), *frames, *page);
  return frames->data;
}

// Moves frames back to the addresses of a page that is marked as being moved. Returns false if the system
// refuses, and leaves the frames where they are.
bool StableAddress::attach(Page& page, c10::DataPtr& frames) {
  const auto* const block = static_cast<DetachedFrames*>(frames.get_context());
  if (!block->pool.move_in(block->frames, const_cast<void*>(page.data))) return false;
  delete static_cast<DetachedFrames*>(frames.release_context());
  return true;
}

// Called with the lock held. If attaching has failed, the next thread that needs the page tries again.
void StableAddress::end_attaching(Page& page, bool attached, c10::DataPtr frames) {
  not_moved(page);
  if (attached) return;
  page.block = std::move(frames);
  throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "the system has no memory to map a page with");
}

c10::DataPtr StableAddress::allocate(const Page& page) {
  {
    const Decision decision(mutex_);
    if (page.kept) return {};
  }
  FramePool& pool = frames_for(page);
  c10::DataPtr frames = frames_of(pool, pool.take(page.frame_bytes), page);
  count_alive(static_cast<std::int64_t>(page.bytes));
  return frames;
}

void StableAddress::keep(Page& page) {
  page.kept = std::exchange(page.block, {});
  count(page.kept, 0);
  raise(most_away_bytes_, away_bytes_ += page.frame_bytes);
}

c10::DataPtr StableAddress::take_kept(Page& page) {
  c10::DataPtr frames = std::exchange(page.kept, {});
  if (!frames) return frames;
  count(frames, page.bytes);
  away_bytes_ -= page.frame_bytes;
  return frames;
}

// ---- out

// The program cannot reach the bytes of a page that is away. So if the tier is host memory, they can stay in
// the page's own frames.
PageWay::Place StableAddress::take_place(const Page& page, Tier& tier) {
  if (const auto slot = tier.keep(page.bytes)) return {slot, /*kept=*/true};
  return {tier.take(page.bytes)};
}

bool StableAddress::must_be_written(const PagePtr& page) {
  Decision decision(mutex_);
  if (page->being_moved) {  // Another thread is moving it, and will have handled it after this wait.
    wait_until_alone(*page, decision);
    return false;
  }
  if (page->gone) return false;
  if (mover_.wanted(*page) || !is_there(*page, false)) {
    table_.end_preparing(*page);
    return false;
  }
  if (!page->untouched) return true;
  page->untouched = false;
  count_alive(-static_cast<std::int64_t>(page->bytes));
  leave_ledger(*page);
  mover_.left(*page);
  return false;
}

// The frames are detached before they are read, so that no write goes unseen.
PageCopy StableAddress::copy_out(const PagePtr& page, const Decision&) {
  PageCopy copy{PageCopy::Direction::kOut, page->tier, *page->slot, nullptr, page->bytes};
  copy.kept = page->keeps;
  if (page->was_clean) copy.known_hash = page->hash;
  page->hashes |= page->was_clean;
  copy.hashed = page->hashes && !page->keeps;
  copy.open = [this, page](Transfer& transfer) { return detach(page, transfer); };
  copy.ended = settled_at_once([this, page](Transfer& transfer) { settle_leaving(page, transfer); });
  return copy;
}

void StableAddress::settle_leaving(const PagePtr& page, Transfer& transfer) {
  c10::DataPtr frames;
  const auto is_leaving = [&] {
    return page->transfer.get() == &transfer && page->state == PageState::kLeaving;
  };
  {
    Decision decision(mutex_);
    wait_until_alone(*page, decision);
    if (!is_leaving()) return;
    if (page->gone) {
      mover_.end_transfer(*page, decision);
      mover_.drop_slot(*page, decision);
      return decision.drop(std::exchange(page->block, {}));
    }
    if (page->block && !transfer.error && !mover_.wanted(*page)) {
      leave_ledger(*page);
      if (page->keeps) keep(*page);
      decision.drop(std::exchange(page->block, {}));
      return mover_.left(*page, transfer, decision);
    }
    moving(*page);
    frames = std::exchange(page->block, {});
  }
  const bool there = !frames || attach(*page, frames);
  Decision decision(mutex_);
  end_attaching(*page, there, std::move(frames));
  mover_.stayed(*page, transfer, decision);
  if (transfer.busy) table_.busy(*page);
}

// ---- in

PageCopy StableAddress::copy_in(const PagePtr& page, const Decision&) {
  PageCopy copy{PageCopy::Direction::kIn, page->tier, *page->slot, page->block.get(), page->bytes};
  copy.kept = page->keeps;
  copy.ended = settled_at_once([this, page](Transfer& transfer) {
    if (!transfer.error) settle_coming(page, transfer, nullptr);  // The thread that waits gets an error.
  });
  return copy;
}

void StableAddress::settle_coming(const PagePtr& page, Transfer& transfer, c10::StorageImpl*) {
  c10::DataPtr frames;
  {
    Decision decision(mutex_);
    wait_until_alone(*page, decision);
    if (page->transfer.get() != &transfer || page->state != PageState::kComing) return;
    if (mover_.stays_away(*page, transfer, decision)) return;
    moving(*page);
    frames = std::exchange(page->block, {});
  }
  const bool there = attach(*page, frames);
  Decision decision(mutex_);
  end_attaching(*page, there, std::move(frames));
  heap_.come(*page, [](const void* data, std::uint64_t bytes) {
    Blocks::instance().grow(data, static_cast<std::int64_t>(bytes));
  });
  mover_.came(*page, transfer, decision);
}

// ---- at a fork

void StableAddress::after_fork_in_child() {
  faults_.open_anew();
  small_frames_.watch_again();
  large_frames_.watch_again();
  heap_.foreign_blocks([&](PageHeap::Block& block) {
    const auto [begin, bytes] = watched(block.pages);
    faults_.watch(begin, bytes);
  });
}

}  // namespace reef
