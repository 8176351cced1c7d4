#include "page/stable_address.h"

#include <sys/mman.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <system_error>
#include <utility>

#include "ledger/blocks.h"
#include "ledger/counting_allocator.h"
#include "page/pager.h"
#include "round_up.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace reef {
namespace {

// Each costs up to two of the 65,530 mappings that a process may have.
constexpr std::size_t kMostForeign = 12000;
constexpr std::uint64_t kMostChunks = 256;  // of a block

// Frames that are a page's, out of its addresses; its bytes count as alive as long as there are such.
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

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

// What is watched of another allocator's block.
std::pair<void*, std::uint64_t> watched(const c10::SmallVector<PagePtr, 1>& pages) {
  const auto* const begin = static_cast<const char*>(pages.front()->data);
  const auto* const end = static_cast<const char*>(pages.back()->data) + pages.back()->frame_bytes;
  return {const_cast<char*>(begin), static_cast<std::uint64_t>(end - begin)};
}

}  // namespace

StableAddressMover::StableAddressMover(std::mutex& mutex, PageTable& table, Memory& memory,
                                       FaultAccess access, std::uint64_t address_bytes)
    : PageMover(mutex, table, memory), faults_(access), frames_(faults_, address_bytes) {}

// ---- which pages

void StableAddressMover::pages_of(c10::StorageImpl& storage, Visit visit, const Decision&) {
  const void* const data = storage._mutable_data_ptr_no_checks().get();
  if (data != nullptr && storage.nbytes() > 0) heap_.pages_of(data, storage.nbytes(), visit);
}

// Of LibTorch's allocator, which tells when it is freed. Its first and last bytes may share their frames with
// others' memory, and stay.
void StableAddressMover::make_pages(Pager& pager, c10::StorageImpl& storage, Visit visit, Decision&) {
  const c10::DataPtr& owned = storage._mutable_data_ptr_no_checks();
  void* const data = owned.get();
  const std::uint64_t begin = round_up(reinterpret_cast<std::uint64_t>(data), FramePool::kFrameBytes);
  const std::uint64_t end = (reinterpret_cast<std::uint64_t>(data) + storage.nbytes()) /
                            FramePool::kFrameBytes * FramePool::kFrameBytes;
  if (data == nullptr || owned.get_context() != data || begin >= end || heap_.find(data) != nullptr) return;
  if (storage.device() != memory_.device() || heap_.foreign_count() >= kMostForeign ||
      !memory_.counts(storage))
    return;
  try {
    if (::madvise(pointer(begin), end - begin, MADV_POPULATE_WRITE) != 0) return;
    faults_.watch(pointer(begin), end - begin);
  } catch (const std::system_error&) {  // another watches it, or there are too many mappings
    return;
  }
  PageHeap::Block block{storage.nbytes(), true, {}};
  const std::uint64_t chunk =
      std::max(chunk_bytes_, round_up((end - begin) / kMostChunks, FramePool::kFrameBytes));
  for (std::uint64_t start = begin; start < end; start += chunk) {
    const PagePtr page(new Page(pager));
    page->data = pointer(start);
    page->block_start = data;
    page->bytes = page->frame_bytes = std::min(chunk, end - start);
    table_.add(page);
    block.pages.push_back(page);
  }
  for (const PagePtr& page : block.pages) visit(*page);
  heap_.add(data, std::move(block));
}

PageHeap::Block StableAddressMover::make_block(Pager& pager, void* data, std::uint64_t bytes,
                                               std::uint64_t chunk_bytes, Contents contents, Visit visit,
                                               Decision&) {
  PageHeap::Block block{bytes, false, {}};
  const std::uint64_t chunk = std::max(chunk_bytes, round_up(bytes / kMostChunks, FramePool::kFrameBytes));
  for (std::uint64_t offset = 0; offset < bytes; offset += chunk) {
    const PagePtr page(new Page(pager));
    page->data = static_cast<char*>(data) + offset;
    page->block_start = data;
    page->bytes = std::min(chunk, bytes - offset);
    page->frame_bytes = round_up(page->bytes, FramePool::kFrameBytes);
    page->state = contents == Contents::kAway ? PageState::kAway : PageState::kResident;
    page->counted_away = contents == Contents::kAway;
    page->untouched = contents == Contents::kUntouched;
    table_.add(page);
    visit(*page);
    block.pages.push_back(page);
  }
  if (contents != Contents::kAway) count_alive(static_cast<std::int64_t>(bytes));
  return block;
}

void StableAddressMover::touch(Page& page) {
  {
    Decision decision(mutex_);
    wait_until_alone(page, decision);
    if (page.gone || !page.untouched) return;
    moving(page);
  }
  std::exception_ptr failed;
  try {
    frames_.move_in(frames_.take(page.frame_bytes), const_cast<void*>(page.data));
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

bool StableAddressMover::remove_block(const void* data, bool foreign, Decision& decision) {
  const PageHeap::Block* block = heap_.find(data);
  if (block == nullptr || block->foreign != foreign) return false;
  const c10::SmallVector<PagePtr, 1> all = block->pages;
  decision.wait(moved_, [&] {
    return std::none_of(all.begin(), all.end(), [](const PagePtr& page) { return page->being_moved; });
  });
  const auto gone = heap_.remove(data);
  if (gone.empty()) return true;
  for (const PagePtr& page : gone) {
    const bool there = page->state == PageState::kResident || page->state == PageState::kClean;
    forget(*page, decision, /*freed=*/true);
    if (foreign) continue;
    if (there) count_alive(-static_cast<std::int64_t>(page->bytes));
    if (there && !page->untouched) {
      frames_.keep({const_cast<void*>(page->data), page->frame_bytes});
    } else {
      frames_.give_up_addresses(page->data, page->frame_bytes);
    }
  }
  if (foreign) {
    const auto [begin, bytes] = watched(gone);
    faults_.unwatch(begin, bytes);
  }
  return true;
}

void StableAddressMover::release(Page& page, Decision& decision) {
  const PageHeap::Block* const block = heap_.find(page.block_start);
  if (block == nullptr || !block->foreign) return;
  const bool in_use = std::any_of(block->pages.begin(), block->pages.end(), [&](const PagePtr& one) {
    return one->holds > 0 || !is_there(*one, false);
  });
  if (!in_use) remove_block(page.block_start, /*foreign=*/true, decision);
}

// What is on its way has its bytes elsewhere, and gives them back when it has come.
bool StableAddressMover::forget(Page& page, Decision& decision, bool) {
  if (page.gone) return false;
  const PagePtr keep(&page);
  const bool on_its_way = page.transfer != nullptr;
  if (page.state == PageState::kLeaving) leave_ledger(page);
  table_.remove(page);
  if (on_its_way && (page.transfer->cancel() || page.transfer->done())) {
    std::erase(leaving_, &page);
    end_coming(page, decision);
  }
  if (page.transfer != nullptr) return false;
  drop_slot(page, decision);
  decision.drop(std::move(page.block));
  return false;
}

bool StableAddressMover::is_there(const Page& page, bool) const {
  return !page.being_moved && (page.state == PageState::kResident || page.state == PageState::kClean);
}

void StableAddressMover::leave_ledger(Page& page) {
  heap_.leave(page, [](const void* data, std::uint64_t bytes) {
    Blocks::instance().grow(data, -static_cast<std::int64_t>(bytes));
  });
}

// ---- frames

// Empty: a device is at work with some of them.
c10::DataPtr StableAddressMover::detach(Page& page) {
  const auto frames = frames_.move_out(const_cast<void*>(page.data), page.frame_bytes);
  return frames ? frames_of(frames_, *frames, page) : c10::DataPtr();
}

void StableAddressMover::attach(Page& page, c10::DataPtr frames) {
  const std::unique_ptr<DetachedFrames> block(static_cast<DetachedFrames*>(frames.release_context()));
  frames_.move_in(block->frames, const_cast<void*>(page.data));
}

// With the lock, as all that follows up to evict().
void StableAddressMover::moving(Page& page) {
  page.being_moved = true;
  ++moving_;
}

void StableAddressMover::not_moved(Page& page) {
  --moving_;
  page.being_moved = false;
  moved_.notify_all();
}

c10::DataPtr StableAddressMover::allocate(const Page& page) {
  c10::DataPtr frames = frames_of(frames_, frames_.take(page.frame_bytes), page);
  count_alive(static_cast<std::int64_t>(page.bytes));
  return frames;
}

// ---- out

void StableAddressMover::leave(Page& page, c10::DataPtr frames, Decision& decision) {
  leave_ledger(page);
  left(page);
  decision.drop(std::move(frames));
}

// False: it is wanted, or another thread is at it and has seen to it when this returns.
bool StableAddressMover::begin_moving(Page& page) {
  Decision decision(mutex_);
  if (page.being_moved) {
    wait_until_alone(page, decision);
    return false;
  }
  if (page.gone) return false;
  if (wanted(page) || !is_there(page, false)) {
    table_.end_preparing(page);
    return false;
  }
  moving(page);
  return true;
}

// Its frames, being out of reach, are back where they were.
void StableAddressMover::stays(Page& page, c10::DataPtr frames) {
  if (frames) attach(page, std::move(frames));
  Decision decision(mutex_);
  not_moved(page);
  no_copy(page);
  if (page.slot) has_copy(page);
  table_.end_preparing(page);
}

bool StableAddressMover::evict(const PagePtr& page, Way way) {
  if (let_it_come(page) || !begin_moving(*page)) return true;
  if (page->untouched) {
    Decision decision(mutex_);
    page->untouched = false;
    count_alive(-static_cast<std::int64_t>(page->bytes));
    not_moved(*page);
    leave(*page, {}, decision);
    return true;
  }
  c10::DataPtr frames;
  try {
    frames = detach(*page);
  } catch (...) {
    stays(*page, {});
    throw;
  }
  if (!frames) {
    Decision decision(mutex_);
    not_moved(*page);
    table_.busy(*page);
    return true;
  }
  std::vector<std::shared_ptr<Tier>> tiers;
  std::optional<std::uint64_t> known;
  bool pinned_too = false;
  {
    const Decision decision(mutex_);
    tiers = tiers_for(*page, decision);
    pinned_too = page->leaves_pinned;
    if (page->state == PageState::kClean) known = page->hash;
  }
  const bool same = known && memory_.hash(frames.get(), page->bytes) == *known;
  if (known) {
    Decision decision(mutex_);
    if (same && !wanted(*page)) {
      ++counts_.clean_evictions;
      not_moved(*page);
      leave(*page, std::move(frames), decision);
      return true;
    }
    if (!same) ++counts_.unseen_writes;
    page->written();
  }
  std::exception_ptr failed;
  do {
    for (const auto& tier : tiers) {
      try {
        const std::shared_ptr<Transfer> transfer = write(page, tier, frames, way);
        if (transfer == nullptr) continue;  // no room
        if (way == Way::kBeside) {
          start_or_run(*transfer);
          return true;
        }
        count_waiting([&] { transfer->run(); });
        failed = transfer->error;
        settle_leaving(page, transfer);
        if (!failed) return true;
        {
          const Decision decision(mutex_);  // for the next tier
          table_.begin_preparing(*page);
          page->leaves_pinned = pinned_too;
        }
        if (!begin_moving(*page)) return true;
        frames = detach(*page);
        if (!frames) break;
      } catch (...) {
        failed = std::current_exception();
      }
    }
  } while (!failed && give_up_copies(page->bytes));
  stays(*page, std::move(frames));
  if (failed) std::rethrow_exception(failed);
  return false;
}

// nullptr: the tier has no room.
std::shared_ptr<Transfer> StableAddressMover::write(const PagePtr& page, const std::shared_ptr<Tier>& tier,
                                                    c10::DataPtr& frames, Way way) {
  bool has_slot = false;
  {
    Decision decision(mutex_);
    has_slot = page->slot && page->tier == tier;
    no_copy(*page);  // nobody gives it up from now on
  }
  const std::optional<Tier::Slot> slot = has_slot ? std::nullopt : tier->take(page->bytes);
  if (!has_slot && !slot) return nullptr;
  Decision decision(mutex_);
  if (slot) {
    drop_slot(*page, decision);
    page->tier = tier;
    page->slot = slot;
  }
  page->block = std::move(frames);
  page->transfer = memory_.prepare(copy_of(*page, PageCopy::Direction::kOut, page->block.get()));
  page->state = PageState::kLeaving;
  page->leaves_beside = way == Way::kBeside;
  leaving_.push_back(page);
  not_moved(*page);
  return page->transfer;
}

void StableAddressMover::settle_leaving(const PagePtr& page, const std::shared_ptr<Transfer>& transfer) {
  c10::DataPtr frames;
  {
    Decision decision(mutex_);
    wait_until_alone(*page, decision);
    if (page->transfer != transfer || page->state != PageState::kLeaving) return;
    if (page->gone) {
      end_leaving(*page, decision);
      drop_slot(*page, decision);
      return decision.drop(std::move(page->block));
    }
    if (!transfer->error && !transfer->cancelled) {
      count_out(*page, *transfer);
      page->hash = transfer->hash;
      if (!wanted(*page)) {
        end_leaving(*page, decision);
        return leave(*page, std::move(page->block), decision);
      }
    }
    moving(*page);
    frames = std::move(page->block);
  }
  attach(*page, std::move(frames));
  Decision decision(mutex_);
  not_moved(*page);
  end_leaving(*page, decision);
  if (transfer->error) {
    // The next tier is tried when the page must leave; of the last's failure somebody has to be told.
    if (page->leaves_beside && page->tier == tiers_.back()) keep_error(transfer->error, decision);
    drop_slot(*page, decision);
  } else {
    has_copy(*page);
    if (!transfer->cancelled) page->state = PageState::kClean;
  }
  table_.end_preparing(*page);
}

// ---- in

void StableAddressMover::settle_coming(const PagePtr& page, const std::shared_ptr<Transfer>& transfer,
                                       c10::StorageImpl*) {
  c10::DataPtr frames;
  {
    Decision decision(mutex_);
    wait_until_alone(*page, decision);
    if (page->transfer != transfer || page->state != PageState::kComing) return;
    if (page->gone || transfer->error) {
      end_coming(*page, decision);
      decision.drop(std::move(page->block));
      if (page->gone) return drop_slot(*page, decision);
      table_.stayed_away(*page);
    } else {
      moving(*page);
      frames = std::move(page->block);
    }
  }
  if (transfer->error) std::rethrow_exception(transfer->error);
  attach(*page, std::move(frames));
  Decision decision(mutex_);
  not_moved(*page);
  end_coming(*page, decision);
  if (page->slot) count_in(*page, *transfer);
  heap_.come(*page, [](const void* data, std::uint64_t bytes) {
    Blocks::instance().grow(data, static_cast<std::int64_t>(bytes));
  });
  table_.came(*page);
  if (page->slot) has_copy(*page);
}

// ---- at a fork

void StableAddressMover::after_fork_in_child() {
  leave_tiers_alone();
  faults_.open_anew();
  frames_.after_fork_in_child();
  heap_.foreign_blocks([&](PageHeap::Block& block) {
    const auto [begin, bytes] = watched(block.pages);
    faults_.watch(begin, bytes);
  });
}

}  // namespace reef
