#include "page/page_mover.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "ledger/blocks.h"

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

void PageMover::left(Page& page) {
  ++counts_.evictions;
  evicted_bytes_ += page.bytes;
  no_copy(page);
  table_.left(page);
  table_.end_preparing(page);
}

void PageMover::end_leaving(Page& page, Decision& decision) {
  std::erase(leaving_, &page);
  decision.drop(std::exchange(page.transfer, nullptr));
  page.state = PageState::kResident;
}

// ---- in

void PageMover::fetch(const PagePtr& page, c10::DataPtr block, Way way, c10::StorageImpl* owner) {
  std::shared_ptr<Transfer> transfer;
  {
    Decision decision(mutex_);
    if (page->gone || page->state != PageState::kAway) return decision.drop(std::move(block));
    page->block = std::move(block);
    transfer = page->slot ? memory_.prepare(copy_of(*page, PageCopy::Direction::kIn, page->block.get()))
                          : std::make_shared<NothingToRead>();
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
    if (page->state == PageState::kLeaving && wanted(*page)) transfer->cancel();
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
