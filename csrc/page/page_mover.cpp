#include "page/page_mover.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "reef/bytes.h"
#include "reef/ledger.h"
#include "tier/hash.h"

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

// The copy, as a range in torch's profiler where the submitting thread is being profiled. Out, it gives the
// hash of what was there; if something writes at this moment, the hash is not that of the page, and it stays.
std::function<std::uint64_t()> copy_of(const Page& page, void* data, bool out) {
  std::optional<at::ThreadLocalState> profiled;
  if (at::hasThreadLocalCallbacks()) profiled.emplace();
  return [tier = page.tier, slot = *page.slot, bytes = page.bytes, data, out, profiled] {
    const auto copy = [&] {
      const std::uint64_t hash = out ? hash_bytes(data, bytes) : 0;
      out ? tier->write(slot, data) : tier->read(slot, data);
      return hash;
    };
    if (!profiled) return copy();
    const at::ThreadLocalStateGuard guard(*profiled);
    at::RecordFunction range(at::RecordScope::USER_SCOPE);
    if (range.isActive()) {
      range.before((out ? "reef::evict to " : "reef::fetch from ") + tier->name() + ", " +
                   format_bytes(static_cast<std::int64_t>(bytes)));
    }
    return copy();
  };
}

}  // namespace

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
  if (hash_bytes(page.data, page.bytes) == page.hash) return true;
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
    double seconds = 0;
    try {
      const Stopwatch of_copy(seconds);
      page.hash = copy_of(page, const_cast<void*>(page.data), true)();
    } catch (...) {
      give_back_slot(page);
      throw;
    }
    out_speed_.bytes += static_cast<double>(page.bytes);
    out_speed_.seconds += seconds;
    counts_.bytes_out += page.bytes;
  } else {
    ++counts_.clean_evictions;
  }
  ++counts_.evictions;
  table_.leave(page, *storage);
  return true;
}

void PageMover::start_evict(Page& page) {
  if (page.dead || page.pins > 0) return;
  if (page.state == PageState::kClean) evict(page);
  if (page.state != PageState::kResident) return;
  const c10::intrusive_ptr<c10::StorageImpl> storage = page.storage.lock();
  if (!storage || !may_leave(page, *storage) || !take_slot(page)) return;
  auto transfer = std::make_shared<Transfer>(copy_of(page, const_cast<void*>(page.data), true));
  out_.submit(transfer);
  page.transfer = std::move(transfer);
  page.state = PageState::kLeaving;
  leaving_.push_back(&page);
}

// Its transfer is done, or has been cancelled.
void PageMover::end_leaving(Page& page, bool stays) {
  leaving_.erase(std::find(leaving_.begin(), leaving_.end(), &page));
  const std::shared_ptr<Transfer> transfer = std::exchange(page.transfer, nullptr);
  page.state = PageState::kResident;
  if (!transfer->done()) return;
  if (transfer->error) {
    give_back_slot(page);
    keep_error(transfer->error);
    return;
  }
  out_speed_.bytes += static_cast<double>(page.bytes);
  out_speed_.seconds += transfer->seconds;
  counts_.bytes_out += page.bytes;
  page.hash = transfer->hash;
  if (!stays && !is_as_in_its_slot(page)) return;
  page.state = PageState::kClean;
  if (stays) return;
  const c10::intrusive_ptr<c10::StorageImpl> storage = page.storage.lock();
  if (!storage || !may_leave(page, *storage)) return forget(page);
  ++counts_.evictions;
  table_.leave(page, *storage);
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
    out_.wait(*first.transfer);
  }
  end_leaving(first, false);
  return true;
}

// ---- in

c10::DataPtr PageMover::allocate(const Page& page) {
  const CategoryScope category(page.category);
  return c10::GetCPUAllocator()->allocate(page.bytes);
}

void PageMover::fetch(Page& page) {
  const c10::intrusive_ptr<c10::StorageImpl> storage = page.storage.lock();
  if (!storage) return;
  const Stopwatch watch(counts_.waited_seconds);
  table_.take_block(page, allocate(page));
  double seconds = 0;
  try {
    const Stopwatch of_copy(seconds);
    copy_of(page, page.block.get(), false)();
  } catch (...) {
    table_.give_up_block(page);
    throw;
  }
  in_speed_.bytes += static_cast<double>(page.bytes);
  in_speed_.seconds += seconds;
  ++counts_.faults;
  counts_.bytes_in += page.bytes;
  table_.come(page, *storage);
}

void PageMover::start_fetch(Page& page) {
  if (page.dead || page.state != PageState::kAway) return;
  table_.take_block(page, allocate(page));
  auto transfer = std::make_shared<Transfer>(copy_of(page, page.block.get(), false));
  try {
    in_.submit(transfer);
  } catch (...) {
    table_.give_up_block(page);
    throw;
  }
  page.transfer = std::move(transfer);
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
  in_speed_.bytes += static_cast<double>(page.bytes);
  in_speed_.seconds += transfer->seconds;
  ++counts_.fetches;
  counts_.bytes_in += page.bytes;
  table_.come(page, *storage);
}

// ---- both

void PageMover::finish(Page& page) {
  if (!page.transfer) return;
  TransferLane& lane = page.state == PageState::kLeaving ? out_ : in_;
  if (page.state == PageState::kLeaving) {
    if (!lane.cancel(*page.transfer)) {
      const Stopwatch watch(counts_.waited_seconds);
      lane.wait(*page.transfer);
    }
    return end_leaving(page, true);
  }
  if (!page.transfer->done()) {
    ++counts_.faults;
    const Stopwatch watch(counts_.waited_seconds);
    lane.wait(*page.transfer);
  }
  end_coming(page);
}

void PageMover::forget(Page& page) {
  if (page.state == PageState::kLeaving) {
    if (!out_.cancel(*page.transfer)) out_.wait(*page.transfer);
    leaving_.erase(std::find(leaving_.begin(), leaving_.end(), &page));
  } else if (page.state == PageState::kComing) {
    if (!in_.cancel(*page.transfer)) in_.wait(*page.transfer);
    table_.give_up_block(page);
  }
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
