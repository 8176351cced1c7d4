#include "page/page_mover.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <system_error>
#include <utility>

#include "ledger/blocks.h"
#include "page/page_way.h"

namespace reef {
namespace {

// Of a page that has never held anything.
struct NothingToRead final : Transfer {
  bool done() override { return true; }
  bool cancel() override { return false; }
  void wait() override {}
};

}  // namespace

PageMover::PageMover(std::mutex& mutex, PageTable& table, Memory& memory)
    : mutex_(mutex),
      table_(table),
      memory_(memory),
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

void PageMover::count_out(const Page& page, const Transfer& transfer) {
  out_speed_.measured(page, transfer);
  counts_.bytes_out += page.bytes;
  Blocks::instance().sample(out_counter_, static_cast<std::int64_t>(counts_.bytes_out));
}

template <class Wait>
void PageMover::count_waiting(const Wait& wait) {
  const auto began = std::chrono::steady_clock::now();
  wait();
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - began;
  const Decision decision(mutex_);
  counts_.waited_seconds += waited.count();
}

// ---- room in the tiers

void PageMover::no_copy(Page& page) {
  if (page.copies.is_linked()) copies_.erase(copies_.iterator_to(page));
}

void PageMover::drop_slot(Page& page, Decision& decision) {
  no_copy(page);
  decision.drop_slot(page, memory_);
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

void PageMover::start_or_run(Transfer& transfer) {
  try {
    transfer.start();
  } catch (const std::system_error&) {
    transfer.run();
  }
}

// Its bytes in a tier that has a slot for it are old, and the room is its own.
std::vector<std::shared_ptr<Tier>> PageMover::tiers_for(const Page& page, const Decision&) const {
  std::vector<std::shared_ptr<Tier>> tiers = tiers_;
  if (page.slot)
    std::stable_partition(tiers.begin(), tiers.end(), [&](const auto& tier) { return tier == page.tier; });
  return tiers;
}

bool PageMover::let_it_come(const PagePtr& page) {
  {
    Decision decision(mutex_);
    if (page->state != PageState::kComing) return false;
  }
  wait_for(page);
  Decision decision(mutex_);
  if (page->state != PageState::kComing) return false;
  table_.being_freed(*page);
  return true;
}

bool PageMover::evict(const PagePtr& page, Way way) {
  if (let_it_come(page) || !page->way->must_be_written(page)) return true;
  std::vector<std::shared_ptr<Tier>> tiers;
  bool leaves_pinned = false;
  {
    const Decision decision(mutex_);
    tiers = tiers_for(*page, decision);
    leaves_pinned = page->leaves_pinned;
  }
  std::exception_ptr failed;
  do {
    for (const auto& tier : tiers) {
      try {
        std::shared_ptr<Transfer> transfer;
        const Begun begun = begin_leaving(page, tier, way, transfer);
        if (begun == Begun::kNoRoom) continue;
        if (begun == Begun::kStays) return true;
        if (way == Way::kBeside) {
          start_or_run(*transfer);
          return true;
        }
        count_waiting([&] { transfer->run(); });
        page->way->settle_leaving(page, *transfer);
        failed = transfer->error;
        if (!failed) return true;
        const Decision decision(mutex_);
        if (page->gone || page->state != PageState::kResident) return true;
        table_.begin_preparing(*page);  // for the next tier
        page->leaves_pinned = leaves_pinned;
      } catch (...) {
        failed = std::current_exception();
      }
    }
  } while (!failed && give_up_copies(page->bytes));
  {
    const Decision decision(mutex_);
    table_.end_preparing(*page);
  }
  if (failed) std::rethrow_exception(failed);
  return false;
}

PageMover::Begun PageMover::begin_leaving(const PagePtr& page, const std::shared_ptr<Tier>& tier, Way way,
                                          std::shared_ptr<Transfer>& transfer) {
  const auto has_slot = [&] { return page->slot && page->tier == tier; };
  bool had_slot = false;
  {
    const Decision decision(mutex_);
    had_slot = has_slot();
  }
  const PageWay::Place place = had_slot ? PageWay::Place() : page->way->take_place(*page, *tier);
  if (!had_slot && !place.slot) return Begun::kNoRoom;
  Begun begun = Begun::kYes;
  {
    Decision decision(mutex_);
    const bool in_memory = page->state == PageState::kResident || page->state == PageState::kClean;
    if (wanted(*page) || !in_memory) {
      table_.end_preparing(*page);
      begun = Begun::kStays;
    } else if (!place.slot && !has_slot()) {  // it was given up meanwhile
      begun = Begun::kNoRoom;
    } else {
      if (place.slot) {
        drop_slot(*page, decision);
        page->tier = tier;
        page->slot = place.slot;
        page->keeps = place.kept;
      }
      no_copy(*page);
      page->was_clean = !place.slot && page->state == PageState::kClean;
      transfer = memory_.prepare(page->way->copy_out(page, decision));
      page->transfer = transfer;
      page->state = PageState::kLeaving;
      page->copied_version = page->version;
      page->leaves_beside = way == Way::kBeside;
      table_.begin_preparing(*page);
      leaving_.push_back(page);
    }
  }
  if (place.slot && begun != Begun::kYes) tier->give_back(*place.slot);
  return begun;
}

void PageMover::left(Page& page) {
  ++counts_.evictions;
  evicted_bytes_ += page.bytes;
  no_copy(page);
  table_.left(page);
  table_.end_preparing(page);
}

void PageMover::left(Page& page, const Transfer& transfer, Decision& decision) {
  if (transfer.same) {
    ++counts_.clean_evictions;
  } else {
    count_out(page, transfer);
    if (page.was_clean && page.hash) ++counts_.unseen_writes;
    page.hash = transfer.hash;
  }
  end_transfer(page, decision);
  left(page);
}

void PageMover::stayed(Page& page, const Transfer& transfer, Decision& decision) {
  end_transfer(page, decision);
  page.state = PageState::kResident;
  if (transfer.error) {
    // The next tier is tried when the page must leave; of the last's failure somebody has to be told.
    if (page.leaves_beside && !tiers_.empty() && page.tier == tiers_.back())
      keep_error(transfer.error, decision);
    drop_slot(page, decision);
  } else if (page.keeps) {
    drop_slot(page, decision);
  } else {
    copies_.push_back(page);
    if (!transfer.cancelled && !transfer.same) {
      count_out(page, transfer);
      page.hash = transfer.hash;
    }
    const bool copied = !transfer.cancelled || page.was_clean;
    if (copied && page.version == page.copied_version) page.state = PageState::kClean;
  }
  table_.end_preparing(page);
}

// ---- in

void PageMover::fetch(const PagePtr& page, c10::DataPtr block, std::atomic<std::uint64_t>& reserved_bytes,
                      Way way, c10::StorageImpl* owner) {
  std::shared_ptr<Transfer> transfer;
  {
    Decision decision(mutex_);
    const bool away = !page->gone && page->state == PageState::kAway;
    c10::DataPtr kept = away ? page->way->take_kept(*page) : c10::DataPtr();
    reserved_bytes -= page->bytes;
    if (kept) std::swap(block, kept);
    decision.drop(std::move(kept));
    if (!away || !block) return decision.drop(std::move(block));  // it was away in another way
    page->block = std::move(block);
    transfer =
        page->slot ? memory_.prepare(page->way->copy_in(page, decision)) : std::make_shared<NothingToRead>();
    page->transfer = transfer;
    table_.coming(*page);
    coming_.push_back(page);
    ++(way == Way::kHere ? counts_.faults : counts_.fetches);
  }
  if (way == Way::kBeside) return start_or_run(*transfer);
  count_waiting([&] { transfer->run(); });
  page->way->settle_coming(page, *transfer, owner);
  if (transfer->error) std::rethrow_exception(transfer->error);
}

bool PageMover::stays_away(Page& page, const Transfer& transfer, Decision& decision) {
  if (!page.gone && !transfer.error) return false;
  end_transfer(page, decision);
  decision.drop(std::exchange(page.block, {}));
  page.gone ? drop_slot(page, decision) : table_.stayed_away(page);
  return true;
}

void PageMover::came(Page& page, const Transfer& transfer, Decision& decision) {
  end_transfer(page, decision);
  const bool held_any = page.slot.has_value();
  if (page.keeps) drop_slot(page, decision);
  table_.came(page);
  if (page.slot) copies_.push_back(page);
  if (!held_any) return;
  in_speed_.measured(page, transfer);
  counts_.bytes_in += page.bytes;
  Blocks::instance().sample(in_counter_, static_cast<std::int64_t>(counts_.bytes_in));
}

// ---- both

void PageMover::end_transfer(Page& page, Decision& decision) {
  std::erase(page.state == PageState::kLeaving ? leaving_ : coming_, &page);
  decision.drop(std::exchange(page.transfer, nullptr));
}

// By the transfer that has finished: the page may have another by now.
void PageMover::settle(const PagePtr& page, Transfer& transfer, c10::StorageImpl* owner) {
  bool leaving = false;
  {
    const Decision decision(mutex_);
    if (page->transfer.get() != &transfer) return;
    leaving = page->state == PageState::kLeaving;
  }
  leaving ? page->way->settle_leaving(page, transfer) : page->way->settle_coming(page, transfer, owner);
}

void PageMover::settle_finished() {
  std::vector<std::pair<PagePtr, std::shared_ptr<Transfer>>> finished;
  {
    const Decision decision(mutex_);
    for (const PagePtr& page : leaving_) {
      if (page->transfer->done()) finished.emplace_back(page, page->transfer);
    }
    for (const PagePtr& page : coming_) {  // the others come when they are wanted
      if (page->gone && page->transfer->done()) finished.emplace_back(page, page->transfer);
    }
  }
  for (const auto& [page, transfer] : finished) settle(page, *transfer, nullptr);
}

void PageMover::wait_for(const PagePtr& page, c10::StorageImpl* owner) {
  std::shared_ptr<Transfer> transfer;
  bool coming = false;
  {
    Decision decision(mutex_);
    transfer = page->transfer;
    if (transfer == nullptr) return;
    coming = page->state == PageState::kComing;
    // What has not begun to leave, and is wanted, need not.
    if (!coming && wanted(*page)) transfer->cancel();
  }
  if (!transfer->done()) {
    count_waiting([&] { transfer->wait(); });
    const Decision decision(mutex_);
    if (coming) ++counts_.faults;
  }
  settle(page, *transfer, owner);
  if (coming && transfer->error) std::rethrow_exception(transfer->error);
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
  settling_all_ = false;  // by a thread that is not there
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

// ---- what ways share

PageWay::PageWay(PageMover& mover)
    : mover_(mover), mutex_(mover.mutex_), table_(mover.table_), memory_(mover.memory_) {}

}  // namespace reef
