// The part of Pager that finds room: for allocations, for pages that come back, and ahead of operators.
#include <algorithm>
#include <chrono>
#include <string_view>
#include <thread>
#include <utility>

#include "ledger/blocks.h"
#include "page/collective_work.h"
#include "page/own_allocation.h"
#include "page/pager.h"
#include "reef/error.h"

namespace reef {
namespace {

constexpr std::uint64_t kLeastSlackBytes = std::uint64_t{16} << 20;
// How often to look again when all pages that may leave are being freed by other threads, which takes only a
// moment.
constexpr int kMostIdleRounds = 2000;
constexpr std::chrono::seconds kPatienceWithCollectives{60};

}  // namespace

// ---- the allocator's side

bool Pager::before_allocate(std::size_t bytes) {
  if (OwnAllocation::is_being_made() || !running()) return false;
  try {
    if (auto& failed = this_threads_frame().failed) std::rethrow_exception(std::exchange(failed, nullptr));
    bool there = false;
    {
      Decision decision(mutex_);
      if (const std::exception_ptr error = mover_.take_error(decision)) std::rethrow_exception(error);
      if (addresses_stay() && bytes >= Page::kLeastBytes) return false;  // See allocate().
      note_needed(bytes, decision);
      there = try_claim(bytes);
    }
    if (!there) make_room(bytes);
  } catch (...) {
    refuse(std::current_exception());
  }
  blocks_.trim(kept_bytes(0));
  return true;
}

void Pager::refuse(const std::exception_ptr& error) {
  Frame& frame = this_threads_frame();
  if (frame.depth == 0) std::rethrow_exception(error);
  frame.refused = error;
  // On an OutOfMemoryError, cuDNN would try another algorithm and would use it from then on.
  const std::string_view op = frame.op != nullptr ? *frame.op : std::string_view();
  if (op.find("conv") != op.npos || op.find("cudnn") != op.npos) {
    try {
      std::rethrow_exception(error);
    } catch (const c10::OutOfMemoryError& refused) {
      C10_THROW_ERROR(Error, message_of(refused));
    }
  }
  std::rethrow_exception(error);
}

void Pager::after_allocate(std::size_t bytes) noexcept { reserved_bytes_ -= bytes; }

void* Pager::allocate(std::size_t bytes) {
  if (!running()) return nullptr;
  if (addresses_stay()) {
    const bool small = bytes < Page::kLeastBytes || OwnAllocation::is_being_made();
    try {
      return small ? nullptr : allocate_stable(bytes);
    } catch (...) {
      refuse(std::current_exception());
    }
  }
  if (bytes < BlockCache::kSmallestBlock) return nullptr;
  // The pager's own allocations have no reservation.
  return blocks_.allocate(bytes, kept_bytes(OwnAllocation::is_being_made() ? bytes : 0));
}

bool Pager::freed(const void* data) noexcept {
  if (!listens_) return false;
  Decision decision(mutex_);
  const bool watched = std::any_of(staying_.begin(), staying_.end(), [&](const auto& stable) {
    return stable != nullptr && stable.load()->remove_block(data, /*foreign=*/true, decision);
  });
  if (watched) {
    listen_while_needed(decision);
    return false;
  }
  Page* const page = table_.at(data);
  if (page == nullptr) return false;
  const bool later = page->way->forget(*page, decision, /*freed=*/true);
  listen_while_needed(decision);
  return later;
}

// Keeps nothing if no budget is in force.
bool Pager::take_back(void* data) noexcept {
  if (StableAddress* const stable = stable_of(data)) {
    {
      Decision decision(mutex_);
      Blocks::instance().died(data);
      stable->remove_block(data, /*foreign=*/false, decision);
      listen_while_needed(decision);
    }
    if (!running()) stable->keep_no_frames();
    return true;
  }
  if (!blocks_.free(data)) return false;
  if (!running()) blocks_.trim(0);
  return true;
}

void Pager::storage_died(Page& page) noexcept {
  Decision decision(mutex_);
  page.way->forget(page, decision, /*freed=*/false);
  listen_while_needed(decision);
}

// Handles frees that the allocator reports later, because it frees under a lock of its own.
void Pager::take_freed(Decision& decision) {
  for (const void* data : memory_->take_freed()) {
    Page* page = table_.at(data);
    if (page == nullptr) continue;
    c10::StorageImpl* const storage = page->storage._unsafe_get_target();
    if (page->storage.expired() || storage->_mutable_data_ptr_no_checks().get() != data)
      page->way->forget(*page, decision, /*freed=*/false);
  }
}

// ---- room

std::uint64_t Pager::alive_bytes(std::uint64_t bytes) const {
  return memory_->alive_bytes() + reserved_bytes_ + bytes;
}

std::uint64_t Pager::limit_bytes() const { return budget_bytes_ + allowed_bytes_; }

// Returns how much free memory may be kept: what is alive and what is kept may together reach the budget or
// the peak, plus a little slack, without which blocks of varying sizes would hardly ever fit into free
// ranges.
std::uint64_t Pager::kept_bytes(std::uint64_t bytes) const {
  const std::uint64_t peak = std::max<std::uint64_t>(seen_peak_bytes_, memory_->peak_bytes());
  const std::uint64_t most = std::min<std::uint64_t>(budget_bytes_, peak);
  return most - std::min(most, alive_bytes(bytes)) + std::max<std::uint64_t>(most / 8, kLeastSlackBytes);
}

// Returns what would be alive if every page left that can.
std::uint64_t Pager::needed_bytes(std::uint64_t bytes) const {
  return alive_bytes(bytes) - table_.evictable_bytes();
}

std::uint64_t Pager::note_needed(std::uint64_t bytes, const Decision&) {
  const std::uint64_t needed = needed_bytes(bytes);
  step_.allocates(needed);
  minimum_bytes_ = std::max(minimum_bytes_, needed);
  return needed;
}

// Reserves room if there is enough. Concurrent threads never claim more than there is, and a failed claim
// does not make another one fail.
bool Pager::try_claim(std::uint64_t bytes) {
  std::uint64_t reserved = reserved_bytes_;
  while (memory_->alive_bytes() + reserved + bytes <= limit_bytes()) {
    if (reserved_bytes_.compare_exchange_weak(reserved, reserved + bytes)) return true;
  }
  return false;
}

RoomWanted Pager::wanted_room(std::uint64_t bytes, const Decision&) const {
  const std::string* const op = this_threads_frame().op;
  return {.op = op == nullptr ? std::string() : *op,
          .device = device(),
          .budget_bytes = budget_bytes_,
          .bytes = bytes,
          .pinned_bytes = table_.memory_bytes() - table_.evictable_bytes(),
          .least_bytes = needed_bytes(bytes),
          .step_bytes = std::max(minimum_bytes_, step_.least_bytes())};
}

// Reserves `bytes` and returns true, or returns false if too much is in use.
bool Pager::find_room(std::uint64_t bytes, MayLeave which) {
  if (find_room_now(bytes, which)) return true;
  if (addresses_stay()) return false;
  // The wait is bounded: the collective may need a rank that in turn waits for this one.
  const auto deadline = std::chrono::steady_clock::now() + kPatienceWithCollectives;
  while (wait_for_collective(deadline))
    if (find_room_now(bytes, which)) return true;
  return false;
}

bool Pager::find_room_now(std::uint64_t bytes, MayLeave which) {
  if (which == MayLeave::kNone) {
    reserved_bytes_ += bytes;
    return true;
  }
  bool retried = false;
  const bool touched = which == MayLeave::kForTouched;
  const auto retry = [&] { return !std::exchange(retried, true) && table_.retry_busy(); };
  for (int idle = 0;;) {
    PagePtr leaving;
    PagePtr victim;
    {
      Decision decision(mutex_);
      take_freed(decision);
      // Memory that is touched without an operator does not belong to a working set.
      const std::uint64_t needed = touched ? needed_bytes(bytes) : note_needed(bytes, decision);
      if (try_claim(bytes)) return true;
      const bool too_much = needed > limit_bytes();
      if ((too_much && which == MayLeave::kUnused && !retry()) || idle > kMostIdleRounds) return false;
      leaving = mover_.leaving(decision);  // Its bytes will be free soon.
      const c10::ArrayRef<PagePtr> spared =
          touched ? c10::ArrayRef<PagePtr>(touched_) : c10::ArrayRef<PagePtr>();
      if (leaving == nullptr)
        victim = table_.victim_but(spared, step_.learner().following(), /*others_too=*/!touched);
      if (leaving == nullptr && victim == nullptr && (too_much || touched)) {
        if (which != MayLeave::kUnused) victim = table_.pinned_victim(spared);
        if (victim == nullptr && !retry()) return false;
        if (victim != nullptr) victim->leaves_pinned = true;
      }
      if (victim != nullptr) table_.begin_preparing(*victim);
    }
    if (leaving != nullptr) {
      mover_.wait_for(leaving);
    } else if (victim == nullptr) {
      ++idle;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } else if (!mover_.evict(victim, PageMover::Way::kHere)) {
      const Decision decision(mutex_);
      throw no_tier_error(wanted_room(bytes, decision), victim->bytes, mover_.tiers(decision),
                          alive_bytes(bytes));
    }
  }
}

void Pager::make_room(std::uint64_t bytes) {
  if (find_room(bytes, most())) return;
  if (memory_->finish_frees() && find_room(bytes, most())) return;
  const Decision decision(mutex_);
  throw working_set_error(wanted_room(bytes, decision));
}

bool Pager::free_some(std::uint64_t bytes) noexcept {
  if (!running()) return false;
  const std::uint64_t before = memory_->alive_bytes();
  try {
    for (;;) {
      if (before - std::min<std::uint64_t>(before, memory_->alive_bytes()) >= bytes) return true;
      PagePtr leaving;
      PagePtr victim;
      {
        Decision decision(mutex_);
        take_freed(decision);
        leaving = mover_.leaving(decision);
        if (leaving == nullptr) victim = table_.victim(step_.learner().following(), /*others_too=*/false);
        if (victim != nullptr) table_.begin_preparing(*victim);
      }
      if (leaving != nullptr) {
        mover_.wait_for(leaving);
      } else if (victim == nullptr || !mover_.evict(victim, PageMover::Way::kHere)) {
        break;
      }
    }
  } catch (...) {
    mover_.keep_error(std::current_exception(), Decision(mutex_));
  }
  return memory_->alive_bytes() < before;
}

// ---- pages that are needed

// Returns true when the page is in memory and, with `writes`, when no transfer reads it. Returns false if
// pages in use leave no room for it.
bool Pager::make_resident(const PagePtr& page, c10::StorageImpl* owner, bool writes, MayLeave which) {
  for (;;) {
    bool away = false;
    {
      Decision decision(mutex_);
      if (page->gone || page->way->is_there(*page, writes)) return true;
      away = page->state == PageState::kAway;
      if (away && page->way->is_freed(*page)) return true;
      if (page->transfer == nullptr && !away) {
        page->way->wait_until_alone(*page, decision);
        continue;
      }
    }
    if (!away) {
      mover_.wait_for(page, owner);
      const Decision decision(mutex_);
      if (owner == nullptr && page->way->is_freed(*page)) return true;  // The freeing thread reports it.
      continue;
    }
    if (!find_room(page->bytes, which)) return false;
    c10::DataPtr block;
    try {
      block = page->way->allocate(*page);
    } catch (...) {
      reserved_bytes_ -= page->bytes;
      throw;
    }
    mover_.fetch(page, std::move(block), reserved_bytes_, PageMover::Way::kHere, owner);
  }
}

// Does the same for a caller that cannot continue without the page.
void Pager::need_resident(const PagePtr& page, c10::StorageImpl* owner, bool writes) {
  if (make_resident(page, owner, writes, most())) return;
  const Decision decision(mutex_);
  throw working_set_error(wanted_room(page->bytes, decision));
}

}  // namespace reef
