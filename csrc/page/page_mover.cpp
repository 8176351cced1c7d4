#include "page/page_mover.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "ledger/blocks.h"
#include "reef/ledger.h"

namespace reef {
namespace {

using Clock = std::chrono::steady_clock;

class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds), started_(Clock::now()) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(Clock::now() - started_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  Clock::time_point started_;
};

}  // namespace

PageMover::PageMover(PageTable& table, Memory& memory)
    : table_(table),
      memory_(memory),
      out_counter_("bytes moved out (" + memory.device().str() + ")"),
      in_counter_("bytes moved in (" + memory.device().str() + ")") {}

void PageMover::set_tiers(std::vector<std::shared_ptr<Tier>> tiers) {
  tiers_ = std::move(tiers);
  counts_ = {};
  error_ = nullptr;
  out_speed_ = {};
  in_speed_ = {};
}

SwapSpeeds PageMover::speeds() const {
  SwapSpeeds speeds;
  if (out_speed_.seconds > 0) speeds.out_bytes_per_second = out_speed_.bytes / out_speed_.seconds;
  if (in_speed_.seconds > 0) speeds.in_bytes_per_second = in_speed_.bytes / in_speed_.seconds;
  return speeds;
}

// ---- out

PageCopy PageMover::copy_of(const Page& page, PageCopy::Direction direction) {
  void* const data = direction == PageCopy::Direction::kOut ? const_cast<void*>(page.data) : page.block.get();
  return {direction, page.tier, *page.slot, data, page.bytes};
}

void PageMover::count_out(const Page& page) {
  counts_.bytes_out += page.bytes;
  Blocks::instance().sample(out_counter_, static_cast<std::int64_t>(counts_.bytes_out));
}

void PageMover::count_in(const Page& page) {
  counts_.bytes_in += page.bytes;
  Blocks::instance().sample(in_counter_, static_cast<std::int64_t>(counts_.bytes_in));
}

void PageMover::Speed::measured(const Page& page, const Transfer& transfer) {
  if (transfer.seconds <= 0) return;  // the device's stream knows
  bytes += static_cast<double>(page.bytes);
  seconds += transfer.seconds;
}

bool PageMover::take_slot(Page& page) {
  for (const auto& tier : tiers_) {
    if (page.slot) break;
    page.slot = tier->take(page.bytes);
    if (page.slot) page.tier = tier;
  }
  return page.slot.has_value();
}

void PageMover::give_back_slot(Page& page) {
  if (page.slot) page.tier->give_back(*page.slot);
  page.slot.reset();
}

// Operators are seen; code that has a raw pointer, and compiled graphs, write without one.
bool PageMover::is_as_in_its_slot(const Page& page) {
  if (memory_.hash(page.data, page.bytes) == page.hash) return true;
  ++counts_.unseen_writes;
  return false;
}

bool PageMover::evict(Page& page) {
  const c10::intrusive_ptr<c10::StorageImpl> storage = page.storage.lock();
  if (!storage || !may_leave(page, *storage)) {  // no page of ours any longer
    forget(page);
    return true;
  }
  const Stopwatch watch(counts_.waited_seconds);
  if (page.state == PageState::kClean && !is_as_in_its_slot(page)) page.state = PageState::kResident;
  if (page.state == PageState::kResident) {
    if (!take_slot(page)) return false;
    const std::shared_ptr<Transfer> copied = memory_.run(copy_of(page, PageCopy::Direction::kOut));
    if (copied->error) {
      give_back_slot(page);
      std::rethrow_exception(copied->error);
    }
    page.hash = copied->hash;
    out_speed_.measured(page, *copied);
    count_out(page);
  } else {
    ++counts_.clean_evictions;
  }
  leave(page, *storage);
  return true;
}

void PageMover::start_evict(Page& page) {
  if (page.dead || page.pins > 0) return;
  if (page.state == PageState::kClean) evict(page);
  if (page.state != PageState::kResident) return;
  const c10::intrusive_ptr<c10::StorageImpl> storage = page.storage.lock();
  if (!storage || !may_leave(page, *storage) || !take_slot(page)) return;
  page.transfer = memory_.start(copy_of(page, PageCopy::Direction::kOut));
  page.state = PageState::kLeaving;
  leaving_.push_back(&page);
}

// Its transfer is done or waited for.
void PageMover::end_leaving(Page& page, bool stays) {
  const std::shared_ptr<Transfer> transfer = no_longer_leaving(page);
  if (transfer->error) {
    give_back_slot(page);
    keep_error(transfer->error);
    return;
  }
  out_speed_.measured(page, *transfer);
  count_out(page);
  page.hash = transfer->hash;
  if (!stays && !is_as_in_its_slot(page)) return;
  page.state = PageState::kClean;
  if (stays) return;
  const c10::intrusive_ptr<c10::StorageImpl> storage = page.storage.lock();
  if (!storage || !may_leave(page, *storage)) return forget(page);
  leave(page, *storage);
}

void PageMover::leave(Page& page, c10::StorageImpl& storage) {
  ++counts_.evictions;
  evicted_bytes_ += page.bytes;
  table_.leave(page, storage);
}

std::shared_ptr<Transfer> PageMover::no_longer_leaving(Page& page) {
  leaving_.erase(std::find(leaving_.begin(), leaving_.end(), &page));
  page.state = PageState::kResident;
  return std::exchange(page.transfer, nullptr);
}

void PageMover::settle() {
  for (std::size_t i = 0; i < leaving_.size();) {
    if (leaving_[i]->transfer->done()) {
      end_leaving(*leaving_[i], false);
    } else {
      ++i;
    }
  }
}

bool PageMover::settle_one() {
  if (leaving_.empty()) return false;
  Page& first = *leaving_.front();
  {
    const Stopwatch watch(counts_.waited_seconds);
    first.transfer->wait();
  }
  end_leaving(first, false);
  return true;
}

// ---- in

c10::DataPtr PageMover::allocate(const Page& page) {
  const CategoryScope category(page.category);
  return memory_.allocate(page.bytes);
}

void PageMover::fetch(Page& page) {
  const c10::intrusive_ptr<c10::StorageImpl> storage = page.storage.lock();
  if (!storage) return;
  const Stopwatch watch(counts_.waited_seconds);
  table_.take_block(page, allocate(page));
  const std::shared_ptr<Transfer> copied = memory_.run(copy_of(page, PageCopy::Direction::kIn));
  if (copied->error) {
    table_.give_up_block(page);
    std::rethrow_exception(copied->error);
  }
  in_speed_.measured(page, *copied);
  ++counts_.faults;
  count_in(page);
  table_.come(page, *storage);
}

void PageMover::start_fetch(Page& page) {
  if (page.dead || page.state != PageState::kAway) return;
  table_.take_block(page, allocate(page));
  try {
    page.transfer = memory_.start(copy_of(page, PageCopy::Direction::kIn));
  } catch (...) {
    table_.give_up_block(page);
    throw;
  }
}

// Its transfer is done.
void PageMover::end_coming(Page& page) {
  const std::shared_ptr<Transfer> transfer = std::exchange(page.transfer, nullptr);
  const c10::intrusive_ptr<c10::StorageImpl> storage = page.storage.lock();
  if (transfer->error || !storage) {
    table_.give_up_block(page);
    if (transfer->error) std::rethrow_exception(transfer->error);
    return;
  }
  in_speed_.measured(page, *transfer);
  ++counts_.fetches;
  count_in(page);
  table_.come(page, *storage);
}

// ---- both

void PageMover::finish(Page& page) {
  if (!page.transfer) return;
  const bool leaving = page.state == PageState::kLeaving;
  if (leaving && page.transfer->cancel()) {
    no_longer_leaving(page);
    return;
  }
  if (!page.transfer->done()) {
    if (!leaving) ++counts_.faults;
    const Stopwatch watch(counts_.waited_seconds);
    page.transfer->wait();
  }
  leaving ? end_leaving(page, true) : end_coming(page);
}

void PageMover::forget(Page& page) {
  if (page.transfer && !page.transfer->cancel()) page.transfer->wait();
  if (page.state == PageState::kLeaving) no_longer_leaving(page);
  if (page.state == PageState::kComing) table_.give_up_block(page);
  page.transfer = nullptr;
  give_back_slot(page);
  table_.remove(page);
}

void PageMover::settle_all() noexcept {
  while (settle_one()) {
  }
  for (const auto& page : table_.pages()) {
    try {
      finish(*page);
    } catch (...) {
      keep_error(std::current_exception());
    }
  }
}

}  // namespace reef
