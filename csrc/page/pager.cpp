#include "page/pager.h"

#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "current_device.h"
#include "high_water.h"
#include "page/no_address.h"
#include "reef/error.h"
#include "reef/ledger.h"

namespace reef {
namespace {

// Indexed by slot. Each pager is made when it is first asked for.
constinit std::array<std::atomic<Pager*>, kDeviceSlots> pagers{};

}  // namespace

// ---- the pager of a device

Pager& Pager::of(c10::Device device) {
  device = with_index(device);
  const auto slot = slot_of(device);
  if (!slot)
    throw ConfigError("there is no budget for " + device.str() + "; only for cpu and cuda:0 to cuda:15");
  static auto* const mutex = new MutexAtFork(AtFork::Order::kTables);
  std::atomic<Pager*>& pager = pagers[*slot];
  if (Pager* const made = pager.load(std::memory_order_acquire)) return *made;
  const std::lock_guard lock(*mutex);
  if (pager == nullptr) pager = new Pager(device.is_cpu() ? host_memory() : cuda_memory(device.index()));
  return *pager;
}

Pager* Pager::running(c10::Device device) {
  const auto slot = slot_of(with_index(device));
  Pager* const pager = slot ? pagers[*slot].load() : nullptr;
  return pager != nullptr && pager->running() ? pager : nullptr;
}

Pager& Pager::cpu() { return of(c10::kCPU); }

Pager::Pager(std::unique_ptr<Memory> memory)
    : AtFork(Order::kPager),
      slot_(*slot_of(memory->device())),
      memory_(std::move(memory)),
      table_(*memory_, step_.learner()),
      mover_(mutex_, table_, *memory_),
      no_address_(mover_),
      peaks_(*memory_) {}

// ---- beginning and end

std::uint64_t Pager::start(PagerOptions options) {
  Decision decision(mutex_);
  if (running()) {
    throw ConfigError("a budget for " + device().str() +
                      " is in force already; end it first, or change it by set_bytes()");
  }
  memory_->prepare_budget();
  memory_->reset_rewritten();
  budget_bytes_ = options.budget_bytes;
  choose_way(options.addresses, decision);
  expect(options.expected_bytes > 0 ? options.expected_bytes : options.budget_bytes, decision);
  // Memory that is passed to a system call must be in place, unless faults of system calls are served.
  uses_more_than_fits_ = addresses_stay() && !options.strict && faults_.access == FaultAccess::kFull;
  waits_while_full_ = options.wait_while_full;
  minimum_bytes_ = 0;
  seen_peak_bytes_ = 0;
  mover_.set_tiers(std::move(options.tiers), decision);
  step_.begin(options.prefetch);
  fetches_.clear();
  mode_ = Mode::kRunning;
  listens_ = true;
  memory_->open(*this);
  return ++starts_;
}

void Pager::check_in_force(std::uint64_t number) const {
  if (running() && number == starts_) return;
  throw ConfigError(mode_ == Mode::kForked
                        ? "the budget is over in this process, which was forked while it was in force: its "
                          "pages come back when they are used; start another budget here"
                        : "this budget has ended, or was replaced by another");
}

void Pager::stop(std::uint64_t number) {
  std::vector<PagePtr> pages;
  {
    Decision decision(mutex_);
    if (mode_ == Mode::kAsleep || number != starts_) return;
    take_freed(decision);
    touched_.clear();
    budget_bytes_ = kNoLimit;
    pages = table_.pages();
  }
  memory_->unlimit();
  mover_.settle_all();
  std::exception_ptr error;
  for (const PagePtr& page : pages) {
    try {
      need_resident(page, nullptr, /*writes=*/false);
    } catch (...) {
      error = std::current_exception();
    }
  }
  pages.clear();
  std::vector<std::shared_ptr<Tier>> tiers;
  {
    Decision decision(mutex_);
    if (const std::exception_ptr beside = mover_.take_error(decision); !error) error = beside;
    step_.learner().reset();
    forget_all(decision);
    if (!error) {
      mode_ = Mode::kAsleep;
      tiers = mover_.take_tiers(decision);
    }
    listen_while_needed(decision);
  }
  memory_->finish_copies();
  if (error) std::rethrow_exception(error);
  keep_nothing();
}

void Pager::abandon(std::uint64_t number) noexcept {
  if (mode_ == Mode::kAsleep || number != starts_) return;
  budget_bytes_ = kNoLimit;
  memory_->unlimit();
  mover_.settle_all();
  std::vector<std::shared_ptr<Tier>> tiers;
  {
    Decision decision(mutex_);
    step_.learner().reset();
    mode_ = Mode::kAsleep;
    tiers = mover_.take_tiers(decision);
    touched_.clear();
    forget_all(decision);
    listen_while_needed(decision);
  }
  memory_->finish_copies();
  keep_nothing();
}

// Returns all free memory to the system.
void Pager::keep_nothing() {
  blocks_.trim(0);
  each_stable([](StableAddress& stable) { stable.keep_no_frames(); });
}

// Ends all pages except those that are away and those that the program has pinned.
void Pager::forget_all(Decision& decision) {
  const std::vector<PagePtr> pages = table_.pages();
  for (const PagePtr& page : pages) {
    if (page->gone || page->state == PageState::kAway || page->state == PageState::kComing) continue;
    page->written();
    mover_.drop_slot(*page, decision);
    if (page->holds == 0) page->way->release(*page, decision);
  }
}

void Pager::listen_while_needed(const Decision&) { listens_ = running() || !table_.pages().empty(); }

// ---- at a fork

// A forked child (such as a data loader's worker) has none of the threads that move or hash pages, and its
// memory is not bounded. So at a fork every page must be either in memory or away; in the child, pages come
// back when they are used.
void Pager::before_fork() {
  for (;;) {
    mutex_.lock();
    const std::shared_ptr<Transfer> transfer = device().is_cpu() ? mover_.under_way() : nullptr;
    bool at_rest = transfer == nullptr && no_address_.at_rest();
    each_stable([&](StableAddress& stable) { at_rest &= stable.at_rest(); });
    if (at_rest) return;
    mutex_.unlock();
    transfer != nullptr ? transfer->wait() : std::this_thread::yield();
  }
}

void Pager::after_fork_in_parent() { mutex_.unlock(); }

void Pager::after_fork_in_child() {
  if (running()) mode_ = Mode::kForked;
  budget_bytes_ = kNoLimit;
  reserved_bytes_ = 0;
  mover_.leave_tiers_alone();
  refusals_.end_others(&this_threads_frame());
  each_stable([](StableAddress& stable) { stable.after_fork_in_child(); });
  mutex_.unlock();
  each_stable([this](StableAddress& stable) { serve_faults(stable); });
}

// ---- for the owner of a budget

std::uint64_t Pager::budget_bytes() const { return budget_bytes_; }

void Pager::set_budget_bytes(std::uint64_t bytes) {
  const std::uint64_t before = budget_bytes_.exchange(bytes);
  try {
    make_room(0);
    memory_->limit(bytes);
  } catch (...) {
    budget_bytes_ = before;
    throw;
  }
  std::optional<PlanWanted> wanted;
  {
    Decision decision(mutex_);
    expect(bytes, decision);
    fetches_.clear();
    wanted = step_.wants_plan(bytes, mover_.speeds(decision));
  }
  plan(wanted);
  if (bytes > before) bring_back();
}

// Brings pages back as far as there is room. The most recently used ones come first, because they are likely
// to be used next.
void Pager::bring_back() {
  struct Wanted {
    PagePtr page;
    bool coming;  ///< whether its room is reserved already
    std::uint64_t last_use;
  };
  std::vector<Wanted> wanted;
  {
    const Decision decision(mutex_);
    for (const PagePtr& page : table_.pages()) {
      const bool coming = page->state == PageState::kComing;
      if (coming || page->state == PageState::kAway) wanted.push_back({page, coming, page->last_use});
    }
  }
  std::sort(wanted.begin(), wanted.end(), [](const Wanted& a, const Wanted& b) {
    return a.coming != b.coming ? a.coming : a.last_use > b.last_use;
  });
  std::uint64_t room = limit_bytes() - std::min(limit_bytes(), alive_bytes(0));
  for (const Wanted& one : wanted) {
    if (!one.coming && one.page->bytes > room) continue;
    if (!one.coming) room -= one.page->bytes;
    need_resident(one.page, nullptr, /*writes=*/false);
  }
}

void Pager::allow(std::uint64_t bytes) { allowed_bytes_ += bytes; }

void Pager::disallow(std::uint64_t bytes) noexcept {
  allowed_bytes_ -= bytes;
  try {
    make_room(0);
  } catch (const BudgetError&) {  // The next allocation will throw the same error.
  } catch (...) {
    mover_.keep_error(std::current_exception(), Decision(mutex_));
  }
}

// Appends the storage's pages to `found`.
void Pager::find(c10::StorageImpl& storage, c10::SmallVectorImpl<Page*>& found, const Decision& decision) {
  const std::size_t before = found.size();
  const auto note = [&](Page& page) { found.push_back(&page); };
  each_stable([&](StableAddress& stable) { stable.pages_of(storage, note, decision); });
  if (found.size() == before) no_address_.pages_of(storage, note, decision);
}

Pager::Pages Pager::find(c10::StorageImpl& storage, const Decision& decision) {
  Pages pages;
  find(storage, pages, decision);
  return pages;
}

Pager::Pages Pager::find_or_register(c10::StorageImpl& storage, Decision& decision) {
  Pages pages = find(storage, decision);
  const auto note = [&](Page& page) {
    adopt(page);
    pages.push_back(&page);
  };
  if (pages.empty() && addresses_stay()) stable().make_pages(*this, storage, note, decision);
  if (pages.empty()) no_address_.make_pages(*this, storage, note, decision);
  for (Page* const page : pages) learn(*page);
  return pages;
}

// Initializes a new page.
void Pager::adopt(Page& page) {
  page.stream = memory_->stream_of(page.data);
  page.last_use = ++clock_;
  if (page.shared) page.next_use = 0;  // Any next operator may use it.
}

void Pager::learn(Page& page) {
  if (page.learned || page.shared || page.leaves_last) return;
  table_.learned(page);
  step_.learner().made(page);
}

void Pager::adopt(const at::Tensor& tensor, const std::string& name) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  Decision decision(mutex_);
  take_freed(decision);
  for (Page* const page : find_or_register(*tensor.storage().unsafeGetStorageImpl(), decision)) {
    page->made_in_step = 0;
    page->parameter = tensor.requires_grad() && tensor.is_leaf();
    if (!name.empty()) page->name = name;
  }
}

void Pager::pin(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return;
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  std::vector<PagePtr> pages;
  {
    Decision decision(mutex_);
    take_freed(decision);
    for (Page* const page : find_or_register(*storage, decision)) {
      pages.emplace_back(page);
      page->written();  // A caller that pins may write.
      ++page->version;
      ++page->holds;
      table_.pin(*page);
    }
    if (pages.empty()) return;
    if (!listens_.exchange(true)) memory_->open(*this);
  }
  try {
    for (const PagePtr& page : pages) need_resident(page, storage, /*writes=*/true);
  } catch (...) {
    Decision decision(mutex_);
    for (const PagePtr& page : pages) let_go(*page);
    throw;
  }
  Decision decision(mutex_);
  for (const PagePtr& page : pages) page->written();
}

void Pager::let_go(Page& page) {
  --page.holds;
  table_.unpin(page);
}

void Pager::unpin(const at::Tensor& tensor) noexcept {
  if (!tensor.has_storage()) return;
  Decision decision(mutex_);
  for (Page* const page : find(*tensor.storage().unsafeGetStorageImpl(), decision)) {
    if (page->holds == 0) continue;
    let_go(*page);
    if (!running() && !page->gone && page->holds == 0 && page->in_memory())
      page->way->release(*page, decision);
  }
  listen_while_needed(decision);
}

std::uint64_t Pager::evictable_bytes(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return 0;
  const Decision decision(mutex_);
  std::uint64_t bytes = 0;
  for (const Page* const page : find(*tensor.storage().unsafeGetStorageImpl(), decision)) {
    if (page->holds == 0) bytes += page->bytes;
  }
  return bytes;
}

PagerCounts Pager::counts() const {
  const std::uint64_t rewritten = memory_->rewritten();
  const Decision decision(mutex_);
  PagerCounts counts{mover_.counts(decision), minimum_bytes_};
  counts.unseen_writes += rewritten;
  return counts;
}

void Pager::reset_counts() {
  memory_->reset_rewritten();
  const Decision decision(mutex_);
  mover_.counts(decision) = {};
  minimum_bytes_ = 0;
}

Trace Pager::trace() const {
  std::shared_ptr<const Trace> trace;
  {
    const Decision decision(mutex_);
    trace = step_.learner().shared_trace();
  }
  return *trace;
}

std::uint64_t Pager::fixed_bytes() const {
  const Decision decision(mutex_);
  return step_.fixed_bytes();
}

SwapSpeeds Pager::speeds() const {
  const Decision decision(mutex_);
  return mover_.speeds(decision);
}

void Pager::plan(const std::optional<PlanWanted>& wanted) {
  if (!wanted) return;
  SwapPlan made = make_plan(*wanted);
  const Decision decision(mutex_);
  step_.use_plan(std::move(made), *wanted);
}

// ---- peaks

// Updates a peak of its own for the block cache, which must not depend on resets by others.
void Pager::see_peaks(const Decision&) {
  raise(seen_peak_bytes_, memory_->peak_bytes());
  peaks_.see();
}

void Pager::add(PeakMark& mark) {
  const Decision decision(mutex_);
  peaks_.add(mark);
}

void Pager::remove(PeakMark& mark) {
  const Decision decision(mutex_);
  peaks_.remove(mark);
}

void Pager::set(PeakMark& mark) {
  const Decision decision(mutex_);
  see_peaks(decision);
  mark = {memory_->alive_bytes(), mover_.evicted_bytes(decision), starts_};
}

std::optional<std::int64_t> Pager::left_bytes(const PeakMark& mark) {
  const Decision decision(mutex_);
  see_peaks(decision);
  if (!running()) return std::nullopt;
  if (mark.start != starts_) return 0;
  if (const std::uint64_t evicted = mover_.evicted_bytes(decision) - mark.evicted_bytes; evicted > 0)
    return -static_cast<std::int64_t>(evicted);
  return static_cast<std::int64_t>(budget_bytes_ - std::min<std::uint64_t>(budget_bytes_, mark.peak_bytes));
}

std::uint64_t Pager::peak_bytes() {
  const Decision decision(mutex_);
  see_peaks(decision);
  return peaks_.peak_bytes();
}

void Pager::reset_peak() {
  const Decision decision(mutex_);
  see_peaks(decision);
  peaks_.reset();
}

}  // namespace reef
