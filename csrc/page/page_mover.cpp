#include "page/page_mover.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "ledger/blocks.h"
#include "page/own_allocation.h"
#include "reef/ledger.h"

namespace reef {
namespace {

// A program that has no thread left for it copies by itself.
void start_or_run(Transfer& transfer) {
  try {
    transfer.start();
  } catch (const std::system_error&) {
    transfer.run();
  }
}

}  // namespace

PageMover::PageMover(std::mutex& mutex, PageTable& table, Memory& memory, Residency& residency)
    : mutex_(mutex),
      table_(table),
      memory_(memory),
      residency_(residency),
      out_counter_("bytes moved out (" + memory.device().str() + ")"),
      in_counter_("bytes moved in (" + memory.device().str() + ")") {}

void PageMover::set_tiers(std::vector<std::shared_ptr<Tier>> tiers, const Decision&) {
  tiers_ = std::move(tiers);
  counts_ = {};
  error_ = nullptr;
  out_speed_ = {};
  in_speed_ = {};
}

SwapSpeeds PageMover::speeds(const Decision&) const {
  SwapSpeeds speeds;
  if (out_speed_.seconds > 0) speeds.out_bytes_per_second = out_speed_.bytes / out_speed_.seconds;
  if (in_speed_.seconds > 0) speeds.in_bytes_per_second = in_speed_.bytes / in_speed_.seconds;
  return speeds;
}

void PageMover::Speed::measured(const Page& page, const Transfer& transfer) {
  if (transfer.seconds <= 0) return;  // the device's stream knows
  bytes += static_cast<double>(page.bytes);
  seconds += transfer.seconds;
}

template <class Wait>
void PageMover::count_waiting(const Wait& wait) {
  const auto began = std::chrono::steady_clock::now();
  wait();
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - began;
  const Decision decision(mutex_);
  counts_.waited_seconds += waited.count();
}

void PageMover::count_out(const Page& page, const Transfer& transfer) {
  out_speed_.measured(page, transfer);
  counts_.bytes_out += page.bytes;
  Blocks::instance().sample(out_counter_, static_cast<std::int64_t>(counts_.bytes_out));
}

void PageMover::count_in(const Page& page, const Transfer& transfer) {
  in_speed_.measured(page, transfer);
  counts_.bytes_in += page.bytes;
  Blocks::instance().sample(in_counter_, static_cast<std::int64_t>(counts_.bytes_in));
}

PageCopy PageMover::copy_of(const Page& page, PageCopy::Direction direction, void* data) const {
  return {direction, page.tier, *page.slot, data, page.bytes};
}

// ---- room in the tiers

void PageMover::no_copy(Page& page) {
  if (page.copies.is_linked()) copies_.erase(copies_.iterator_to(page));
}

void PageMover::drop_slot(Page& page, Decision& decision) {
  no_copy(page);
  decision.drop_slot(page);
}

// Pages that are back in memory can be written once more. The last that came back is the first to give up its
// copy: it is in use, and will be written sooner than those that have been idle since they came.
bool PageMover::give_up_copies(std::uint64_t bytes) {
  Decision decision(mutex_);
  std::uint64_t given_up = 0;
  while (given_up < bytes && !copies_.empty()) {
    Page& page = copies_.back();
    given_up += page.bytes;
    page.written();
    drop_slot(page, decision);
  }
  return given_up > 0;
}

// ---- out

bool PageMover::evict(const PagePtr& page, Way way) {
  std::shared_ptr<Transfer> coming;
  std::vector<std::shared_ptr<Tier>> tiers;
  {
    Decision decision(mutex_);
    if (page->state == PageState::kComing) coming = page->transfer;
    tiers = tiers_;
    // Its bytes there are old, and the room is its own.
    if (page->slot)
      std::stable_partition(tiers.begin(), tiers.end(), [&](const auto& tier) { return tier == page->tier; });
  }
  if (coming) {  // fetched too early
    wait_for(page);
    Decision decision(mutex_);
    if (page->state == PageState::kComing) {
      table_.being_freed(*page);
      return true;
    }
  }
  if (leave_clean(page) || !may_be_written(page)) return true;
  std::exception_ptr failed;
  do {
    for (const auto& tier : tiers) {
      try {
        const std::shared_ptr<Transfer> transfer = begin_leaving(page, tier, way);
        if (transfer == nullptr) {
          Decision decision(mutex_);
          if (page->preparing && !wanted(*page) && page->state == PageState::kResident) continue;  // no room
          table_.end_preparing(*page);
          return true;
        }
        if (way == Way::kBeside) {
          start_or_run(*transfer);
          return true;
        }
        count_waiting([&] { transfer->run(); });
        failed = transfer->error;
        settle_leaving(page, transfer);
        if (!failed) return true;
        Decision decision(mutex_);
        if (wanted(*page) || page->state != PageState::kResident) return true;
        table_.begin_preparing(*page);  // for the next tier
      } catch (...) {
        failed = std::current_exception();
      }
    }
  } while (!failed && give_up_copies(page->bytes));
  {
    Decision decision(mutex_);
    table_.end_preparing(*page);
  }
  if (failed) std::rethrow_exception(failed);
  return false;
}

// Operators are seen; code that has a raw pointer, and compiled graphs, write without one.
bool PageMover::leave_clean(const PagePtr& page) {
  {
    Decision decision(mutex_);
    if (page->state != PageState::kClean || wanted(*page)) return false;
    if (another_hashes(*page, decision)) return true;
    page->being_hashed = true;
  }
  const std::uint64_t hash = hash_of(*page);
  const Residency::Hold owner = residency_.hold(*page);
  Decision decision(mutex_);
  if (page->being_hashed) return true;
  if (page->state != PageState::kClean || wanted(*page)) return false;
  const bool same = hash == page->hash;
  if (!owner) {
    table_.being_freed(*page);
    return true;
  }
  if (!residency_.may_leave(*page, *owner)) {
    forget(*page, decision, /*freed=*/false);
    return true;
  }
  if (!same) {
    ++counts_.unseen_writes;
    page->state = PageState::kResident;
    return false;
  }
  ++counts_.clean_evictions;
  leave(*page, *owner, decision);
  return true;
}

// False: it is wanted, or no page of ours any longer.
bool PageMover::may_be_written(const PagePtr& page) {
  const Residency::Hold owner = residency_.hold(*page);
  Decision decision(mutex_);
  if (page->gone) return false;
  if (wanted(*page) || page->state != PageState::kResident) {
    table_.end_preparing(*page);
    return false;
  }
  if (!owner) {
    table_.being_freed(*page);
    return false;
  }
  if (residency_.may_leave(*page, *owner)) return true;
  forget(*page, decision, /*freed=*/false);
  return false;
}

// nullptr: the tier has no room, or the page is wanted.
std::shared_ptr<Transfer> PageMover::begin_leaving(const PagePtr& page, const std::shared_ptr<Tier>& tier,
                                                   Way way) {
  bool has_slot = false;
  {
    Decision decision(mutex_);
    has_slot = page->slot && page->tier == tier;
  }
  const std::optional<Tier::Slot> slot = has_slot ? std::nullopt : tier->take(page->bytes);
  if (!has_slot && !slot) return nullptr;
  std::shared_ptr<Transfer> transfer;
  {
    Decision decision(mutex_);
    const bool mine = slot || (page->slot && page->tier == tier);
    if (mine && !wanted(*page) && page->state == PageState::kResident) {
      if (slot) {
        drop_slot(*page, decision);
        page->tier = tier;
        page->slot = slot;
      } else {
        no_copy(*page);
      }
      transfer = memory_.prepare(copy_of(*page, PageCopy::Direction::kOut, const_cast<void*>(page->data)));
      page->transfer = transfer;
      page->state = PageState::kLeaving;
      page->copied_version = page->version;
      page->leaves_beside = way == Way::kBeside;
      table_.begin_preparing(*page);
      leaving_.push_back(page);
    }
  }
  if (slot && transfer == nullptr) tier->give_back(*slot);
  return transfer;
}

void PageMover::leave(Page& page, c10::StorageImpl& owner, Decision& decision) {
  ++counts_.evictions;
  evicted_bytes_ += page.bytes;
  no_copy(page);
  table_.left(page);
  table_.end_preparing(page);
  decision.drop(residency_.take_away(page, owner));
}

// Another thread is at it, and will have seen the same when this returns.
bool PageMover::another_hashes(const Page& page, Decision& decision) {
  if (!page.being_hashed) return false;
  wait_for_hash(page, decision);
  return true;
}

// Of its memory as it is now; ends what the caller has begun.
std::uint64_t PageMover::hash_of(Page& page) {
  const std::uint64_t hash = memory_.hash(page.data, page.bytes);
  Decision decision(mutex_);
  page.being_hashed = false;
  hashed_.notify_all();
  if (page.gone && !page.being_read()) decision.drop(std::move(page.block));
  return hash;
}

void PageMover::end_leaving(Page& page, Decision& decision) {
  std::erase(leaving_, &page);
  decision.drop(std::exchange(page.transfer, nullptr));
  page.state = PageState::kResident;
}

// What is known without looking at its memory; false: it may leave.
bool PageMover::stays(Page& page, const std::shared_ptr<Transfer>& transfer, Decision& decision) {
  if (page.transfer != transfer || page.state != PageState::kLeaving) return true;  // another has settled it
  if (!transfer->error && !wanted(page)) return false;
  end_leaving(page, decision);
  if (page.gone) {
    drop_slot(page, decision);
    if (!page.being_hashed) decision.drop(std::move(page.block));
    return true;
  }
  if (transfer->error) {
    // The next tier is tried when the page must leave; of the last's failure somebody has to be told.
    if (page.leaves_beside && page.tier == tiers_.back()) keep_error(transfer->error, decision);
    drop_slot(page, decision);
  } else {
    count_out(page, *transfer);
    page.hash = transfer->hash;
    copies_.push_back(page);
    if (page.version == page.copied_version) page.state = PageState::kClean;
  }
  table_.end_preparing(page);
  return true;
}

void PageMover::settle_leaving(const PagePtr& page, const std::shared_ptr<Transfer>& transfer) {
  {
    Decision decision(mutex_);
    if (stays(*page, transfer, decision) || another_hashes(*page, decision)) return;
    page->being_hashed = true;
  }
  const bool same = hash_of(*page) == transfer->hash;
  const Residency::Hold owner = residency_.hold(*page);
  Decision decision(mutex_);
  if (page->being_hashed || stays(*page, transfer, decision)) return;
  count_out(*page, *transfer);
  page->hash = transfer->hash;
  end_leaving(*page, decision);
  copies_.push_back(*page);
  if (!owner) return table_.being_freed(*page);
  if (!residency_.may_leave(*page, *owner)) {
    forget(*page, decision, /*freed=*/false);
  } else if (same && page->version == page->copied_version) {
    leave(*page, *owner, decision);
  } else {
    ++counts_.unseen_writes;
    table_.end_preparing(*page);
  }
}

// ---- in

c10::DataPtr PageMover::allocate(const Page& page) {
  const OwnAllocation own;
  const CategoryScope category(page.category);
  return memory_.allocate(page.bytes);
}

void PageMover::fetch(const PagePtr& page, c10::DataPtr block, Way way, c10::StorageImpl* owner) {
  std::shared_ptr<Transfer> transfer;
  {
    Decision decision(mutex_);
    if (page->gone || page->state != PageState::kAway) return decision.drop(std::move(block));
    page->block = std::move(block);
    transfer = memory_.prepare(copy_of(*page, PageCopy::Direction::kIn, page->block.get()));
    page->transfer = transfer;
    table_.coming(*page);
    coming_.push_back(page);
    ++(way == Way::kHere ? counts_.faults : counts_.fetches);
  }
  if (way == Way::kBeside) return start_or_run(*transfer);
  count_waiting([&] { transfer->run(); });
  settle_coming(page, transfer, owner);
}

void PageMover::end_coming(Page& page, Decision& decision) {
  std::erase(coming_, &page);
  decision.drop(std::exchange(page.transfer, nullptr));
}

void PageMover::settle_coming(const PagePtr& page, const std::shared_ptr<Transfer>& transfer,
                              c10::StorageImpl* owner) {
  {
    Decision decision(mutex_);
    if (page->transfer != transfer || page->state != PageState::kComing) return;
    if (page->gone || transfer->error) {
      end_coming(*page, decision);
      decision.drop(std::move(page->block));
      if (page->gone) return drop_slot(*page, decision);
      table_.stayed_away(*page);
    }
  }
  if (transfer->error) std::rethrow_exception(transfer->error);
  const Residency::Hold hold = owner == nullptr ? residency_.hold(*page) : Residency::Hold();
  if (owner == nullptr) owner = hold.get();
  if (owner == nullptr) return;  // whoever frees it will tell
  Decision decision(mutex_);
  if (page->transfer != transfer || page->state != PageState::kComing || page->gone) return;
  const void* const data = page->block.get();
  end_coming(*page, decision);
  if (c10::DataPtr rest = residency_.put_back(*page, *owner, std::move(page->block))) {
    decision.drop(std::move(rest));
    return table_.stayed_away(*page);
  }
  count_in(*page, *transfer);
  table_.came(*page, data);
  copies_.push_back(*page);
}

// ---- both

// By the transfer that has finished: the page may have another by now.
void PageMover::settle(const PagePtr& page, const std::shared_ptr<Transfer>& transfer,
                       c10::StorageImpl* owner) {
  bool leaving = false;
  {
    const Decision decision(mutex_);
    if (page->transfer != transfer) return;
    leaving = page->state == PageState::kLeaving;
  }
  leaving ? settle_leaving(page, transfer) : settle_coming(page, transfer, owner);
}

void PageMover::settle_finished() {
  std::vector<std::pair<PagePtr, std::shared_ptr<Transfer>>> finished;
  {
    const Decision decision(mutex_);
    for (const PagePtr& page : leaving_) {
      if (page->transfer->done()) finished.emplace_back(page, page->transfer);
    }
  }
  for (const auto& [page, transfer] : finished) settle(page, transfer, nullptr);
}

void PageMover::wait_for(const PagePtr& page, c10::StorageImpl* owner) {
  std::shared_ptr<Transfer> transfer;
  {
    Decision decision(mutex_);
    transfer = page->transfer;
    if (transfer == nullptr) return;
    // What has not begun to leave, and is wanted, need not.
    if (page->state == PageState::kLeaving && wanted(*page) && transfer->cancel()) {
      end_leaving(*page, decision);
      if (page->gone) {
        drop_slot(*page, decision);
        if (!page->being_hashed) decision.drop(std::move(page->block));
      }
      if (page->slot) copies_.push_back(*page);
      return table_.end_preparing(*page);
    }
  }
  if (!transfer->done()) {
    count_waiting([&] { transfer->wait(); });
    const Decision decision(mutex_);
    if (page->state == PageState::kComing) ++counts_.faults;
  }
  settle(page, transfer, owner);
}

std::shared_ptr<Transfer> PageMover::under_way() const {
  for (const auto* pages : {&leaving_, &coming_}) {
    for (const PagePtr& page : *pages) {
      if (!page->transfer->done()) return page->transfer;
    }
  }
  return nullptr;
}

void PageMover::leave_tiers_alone() {
  copies_.clear();
  for (const PagePtr& page : table_.pages()) {
    if (page->state != PageState::kResident && page->state != PageState::kClean) continue;
    page->state = PageState::kResident;
    page->slot.reset();
    page->tier = nullptr;
  }
}

void PageMover::settle_all() noexcept {
  std::vector<PagePtr> pages;
  {
    const Decision decision(mutex_);
    settling_all_ = true;
    pages = leaving_;
    pages.insert(pages.end(), coming_.begin(), coming_.end());
  }
  for (const PagePtr& page : pages) {
    try {
      wait_for(page);
    } catch (...) {
      keep_error(std::current_exception(), Decision(mutex_));
    }
  }
  const Decision decision(mutex_);
  settling_all_ = false;
}

bool PageMover::forget(Page& page, Decision& decision, bool freed) {
  if (page.gone) return false;
  const PagePtr keep(&page);
  const bool away = page.state == PageState::kAway || page.state == PageState::kComing;
  table_.remove(page);
  if (page.transfer) {
    // A device's allocator has the block already; its streams must not write there before it has been read.
    if (!freed && !away) page.transfer->wait();
    if (page.transfer->cancel() || page.transfer->done() || (!freed && !away)) {
      std::erase(leaving_, &page);
      end_coming(page, decision);
    }
  }
  const bool later = freed && page.being_read();
  if (later) page.block = memory_.take_over(page.data);
  if (page.transfer == nullptr) drop_slot(page, decision);
  if (page.transfer == nullptr && !later) decision.drop(std::move(page.block));
  return later;
}

}  // namespace reef
