#include "page/pager.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "ledger/blocks.h"
#include "ledger/counting_allocator.h"
#include "page/storage_access.h"
#include "reef/bytes.h"
#include "reef/error.h"
#include "reef/ledger.h"

namespace reef {
namespace {

// This thread holds the pager's lock. Small enough for the static block, which is found without a call.
[[gnu::tls_model("initial-exec")]] constinit thread_local bool inside = false;

constexpr std::uint64_t kLeastSlackBytes = std::uint64_t{16} << 20;

std::string running_operator() {
  const std::string* op = Pager::this_threads_frame().op();
  return op == nullptr ? std::string("outside any operator") : "operator " + *op;
}

}  // namespace

struct Pager::Entry {
  explicit Entry(const Pager& pager) : lock(pager.mutex_) { inside = true; }
  ~Entry() { inside = false; }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  std::lock_guard<std::mutex> lock;
};

Pager& Pager::cpu() {
  static auto* const pager = new Pager;
  return *pager;
}

// A forked child (a data loader's worker) has none of the tiers' threads, and its memory is not ours to
// bound.
Pager::Pager() : table_(&Pager::storage_died, step_.learner()), mover_(table_) {
  Blocks::instance();  // its lock is taken after ours, at a fork too
  const auto prepare = [] {
    cpu().mutex_.lock();
    inside = true;
    cpu().mover_.settle_all();
    inside = false;
  };
  pthread_atfork(
      prepare, [] { cpu().mutex_.unlock(); },
      [] {
        cpu().running_ = false;
        cpu().mutex_.unlock();
      });
}

Pager::Frame& Pager::this_threads_frame() {
  static thread_local Frame frame;
  return frame;
}

// ---- beginning and end

void Pager::start(PagerOptions options) {
  const Entry entry(*this);
  if (running_) {
    throw ConfigError("a budget for the CPU is in force already; end it first, or change it by set_bytes()");
  }
  budget_bytes_ = options.budget_bytes;
  minimum_bytes_ = 0;
  mover_.set_tiers(std::move(options.tiers));
  step_.begin(options.prefetch);
  fetches_.clear();
  running_ = true;
  set_allocation_gate(this);
}

void Pager::stop() {
  const Entry entry(*this);
  budget_bytes_ = ~std::uint64_t{0};
  mover_.settle_all();
  std::exception_ptr error = mover_.take_error();
  step_.learner().reset();
  for (std::size_t i = table_.pages().size(); i-- > 0;) {
    Page& page = *table_.pages()[i];
    try {
      make_resident(page);
    } catch (...) {
      error = std::current_exception();
      continue;
    }
    if (!page.dead) mover_.forget(page);
  }
  if (error) std::rethrow_exception(error);
  running_ = false;
  blocks_.trim(0);
}

void Pager::abandon() noexcept {
  const Entry entry(*this);
  mover_.settle_all();
  running_ = false;
  blocks_.trim(0);
}

std::uint64_t Pager::budget_bytes() const {
  const Entry entry(*this);
  return budget_bytes_;
}

void Pager::set_budget_bytes(std::uint64_t bytes) {
  const Entry entry(*this);
  const std::uint64_t before = budget_bytes_.exchange(bytes);
  try {
    make_room(0);
  } catch (...) {
    budget_bytes_ = before;
    throw;
  }
  fetches_.clear();
  step_.make_plan(bytes, mover_.speeds());
}

PagerCounts Pager::counts() const {
  const Entry entry(*this);
  return {mover_.counts(), minimum_bytes_};
}

void Pager::reset_counts() {
  const Entry entry(*this);
  mover_.counts() = {};
  minimum_bytes_ = 0;
}

Trace Pager::trace() const {
  const Entry entry(*this);
  return step_.learner().following() ? step_.learner().trace() : Trace{};
}

std::uint64_t Pager::fixed_bytes() const {
  const Entry entry(*this);
  return step_.fixed_bytes();
}

SwapSpeeds Pager::speeds() const {
  const Entry entry(*this);
  return mover_.speeds();
}

// ---- the allocator's side

bool Pager::before_allocate(std::size_t bytes) {
  if (inside || !running_) return false;
  if (auto& failed = this_threads_frame().failed_) std::rethrow_exception(std::exchange(failed, nullptr));
  const Entry entry(*this);
  if (const std::exception_ptr error = mover_.take_error()) std::rethrow_exception(error);
  make_room(bytes);
  reserved_bytes_ += bytes;
  blocks_.trim(kept_bytes(0));
  return true;
}

void Pager::after_allocate(std::size_t bytes) noexcept { reserved_bytes_ -= bytes; }

void* Pager::allocate(std::size_t bytes) {
  if (!running_ || bytes < BlockCache::kSmallestBlock) return nullptr;
  // What the pager allocates for itself has no reservation.
  return blocks_.allocate(bytes, kept_bytes(inside ? bytes : 0));
}

void Pager::freed(const void* data) noexcept {
  if (!running_) return;
  const auto forget = [&] {
    if (Page* page = table_.at(data)) mover_.forget(*page);
  };
  if (inside) return forget();
  const Entry entry(*this);
  forget();
}

// The storage of an evicted page is gone.
void Pager::storage_died(void* page) {
  if (inside) return cpu().mover_.forget(*static_cast<Page*>(page));
  const Entry entry(cpu());
  cpu().mover_.forget(*static_cast<Page*>(page));
}

// ---- pages

Page* Pager::find_or_register(c10::StorageImpl& storage) {
  if (Page* known = table_.find(storage)) return known;
  Page* page = table_.add(storage);
  if (page == nullptr) return nullptr;
  page->last_use = ++clock_;
  step_.learner().made(*page);
  return page;
}

void Pager::adopt(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const Entry entry(*this);
  Page* page = find_or_register(*tensor.storage().unsafeGetStorageImpl());
  if (page == nullptr) return;
  page->made_in_step = 0;
  page->parameter = tensor.requires_grad() && tensor.is_leaf();
}

void Pager::pin(const at::Tensor& tensor) {
  const Entry entry(*this);
  Page* page = find_or_register(*tensor.storage().unsafeGetStorageImpl());
  if (page == nullptr) return;
  make_resident(*page);
  if (page->state == PageState::kClean) page->state = PageState::kResident;  // whoever pins may write
  table_.pin(*page);
}

void Pager::unpin(const at::Tensor& tensor) {
  const Entry entry(*this);
  Page* page = table_.find(*tensor.storage().unsafeGetStorageImpl());
  if (page != nullptr && page->pins > 0) table_.unpin(*page);
}

void Pager::make_resident(Page& page) {
  if (page.dead) return;
  mover_.finish(page);
  if (page.state != PageState::kAway || page.storage.expired()) return;
  make_room(page.bytes);
  mover_.fetch(page);
}

// ---- room

std::uint64_t Pager::alive_bytes(std::uint64_t bytes) const {
  return static_cast<std::uint64_t>(allocator_live_bytes()) + reserved_bytes_ + bytes;
}

// Beside what is alive: up to the budget, or the most that was ever alive, and a little more, without which
// blocks of many sizes would hardly ever fit where others have left.
std::uint64_t Pager::kept_bytes(std::uint64_t bytes) const {
  const std::uint64_t most =
      std::min<std::uint64_t>(budget_bytes_, static_cast<std::uint64_t>(allocator_peak_bytes()));
  return most - std::min(most, alive_bytes(bytes)) + std::max<std::uint64_t>(most / 8, kLeastSlackBytes);
}

// What would be alive with every page away that could be.
std::uint64_t Pager::needed_bytes(std::uint64_t bytes) const {
  return alive_bytes(bytes) - table_.evictable_bytes();
}

void Pager::make_room(std::uint64_t bytes) {
  const std::uint64_t needed = needed_bytes(bytes);
  step_.allocates(needed);
  minimum_bytes_ = std::max(minimum_bytes_, needed);
  const auto over = [&] { return alive_bytes(bytes) > budget_bytes_; };
  if (!over()) return;
  if (needed > budget_bytes_) refuse(bytes);
  mover_.settle();
  while (over()) {
    if (mover_.settle_one()) continue;  // its bytes are on their way already
    Page* page = victim();
    if (page == nullptr) refuse(bytes);
    mover_.finish(*page);  // fetched too early
    if (!mover_.evict(*page)) refuse_without_tier(*page, bytes);
  }
}

void Pager::refuse(std::uint64_t bytes) {
  const std::uint64_t pinned = table_.memory_bytes() - table_.evictable_bytes();
  const std::uint64_t least = needed_bytes(bytes);
  throw BudgetError(running_operator() + " is out of memory. It works on " + format_bytes(pinned + bytes) +
                        " of pages at once, and " + format_bytes(least - pinned - bytes) +
                        " of other memory is alive that cannot leave, in a budget of " +
                        format_bytes(budget_bytes_) + "; give at least " + std::to_string(least) +
                        " bytes (Budget::set_bytes, or a new budget)",
                    least);
}

void Pager::refuse_without_tier(const Page& page, std::uint64_t bytes) {
  std::string full;
  for (const auto& tier : mover_.tiers()) {
    full += (full.empty() ? "" : ", ") + tier->name() + " " + format_bytes(tier->use().used_bytes) + " of " +
            format_bytes(tier->use().capacity_bytes);
  }
  throw BudgetError(running_operator() + " is out of memory. A page of " + format_bytes(page.bytes) +
                        " must leave, and no tier has room for it (" + full +
                        "); give a larger tier, or one more (a disk)",
                    alive_bytes(bytes));
}

// The farthest next use, where the step is known; else, and between equals, the one unused for longest. What
// the step does not know it will not use.
Page* Pager::victim() {
  const bool known = step_.learner().following();
  Page* best = nullptr;
  for (const auto& page : table_.pages()) {
    if (!page->in_memory() || page->pins > 0) continue;
    if (best != nullptr) {
      const std::uint64_t mine = known ? page->next_use : 0;
      const std::uint64_t its = known ? best->next_use : 0;
      if (mine < its || (mine == its && page->last_use >= best->last_use)) continue;
    }
    if (page->storage.expired()) continue;  // being freed by another thread
    best = page.get();
  }
  return best;
}

// ---- operators

void Pager::Frame::enter(const OperatorCall& call, Register what, c10::ArrayRef<Use> uses) {
  Pager& pager = cpu();
  const bool outermost = depth_++ == 0;
  if (outermost) {
    failed_ = nullptr;
    op_ = &(call.in_backward ? call.op.name_in_backward : call.op.name);
    position_ = StepFollower::kUntraced;
    knew_ = false;
  }
  if (!pager.running_ || uses.empty()) return;
  const Entry entry(pager);
  if (outermost) ++pager.clock_;
  StepFollower::Uses known;
  for (const Use& use : uses) {
    if (Page* page = pager.table_.find(*use.storage)) known.push_back({page, use.writes});
  }
  const bool parameters = std::any_of(uses.begin(), uses.end(), [](const Use& use) { return use.parameter; });
  if (what != Register::kAll && known.empty() && !parameters) return;
  knew_ |= !known.empty() || parameters;
  if (outermost && call.records_gradient && pager.step_.begins_step(call.op.name, known)) pager.end_step();

  // All are pinned before the first is faulted in: making room for one must not push out another.
  const std::size_t first = pinned_.size();
  StepFollower::Uses used;
  for (const Use& use : uses) {
    const bool may_register = what == Register::kAll || use.parameter ||
                              (what == Register::kWrittenWithAKnown && knew_ && use.writes);
    Page* page = may_register ? pager.find_or_register(*use.storage) : pager.table_.find(*use.storage);
    if (page == nullptr) continue;
    page->last_use = pager.clock_;
    page->parameter |= use.parameter;
    if (use.writes && page->parameter && !call.in_backward && !call.records_gradient)
      pager.step_.parameter_written();
    pager.table_.pin(*page);
    pinned_.push_back(page);
    used.push_back({page, use.writes});
  }
  if (used.empty()) return;
  if (outermost) position_ = pager.step_.begin_operator(call.op.name, used);
  bring_in(first, used);
  const std::uint64_t needed = pager.needed_bytes(0);
  pager.minimum_bytes_ = std::max(pager.minimum_bytes_, needed);
  if (outermost) pager.step_.operator_runs(pager.alive_bytes(0) - pager.table_.memory_bytes(), needed);
}

void Pager::Frame::bring_in(std::size_t first, const StepFollower::Uses& used) {
  for (std::size_t i = 0; i < used.size(); ++i) {
    Page& page = *pinned_[first + i];
    try {
      cpu().make_resident(page);
    } catch (const std::exception& error) {
      if (!failed_) failed_ = std::current_exception();
      if (const auto storage = page.storage.lock()) refuse_access(*storage, message_of(error));
    }
    if (used[i].writes && page.state == PageState::kClean) page.state = PageState::kResident;
  }
}

void Pager::Frame::leave(const OperatorCall& call, Register what, c10::ArrayRef<Use> results) noexcept {
  Pager& pager = cpu();
  const bool outermost = --depth_ == 0;
  if (outermost) {
    failed_ = nullptr;
    op_ = nullptr;
  }
  if (knew_ && call.op.makes_alike) what = Register::kAll;
  if (pinned_.empty() && (what != Register::kAll || results.empty())) return;
  const Entry entry(pager);
  c10::SmallVector<LearnedPage*, 4> made;
  for (const Use& use : pager.running_ ? results : c10::ArrayRef<Use>{}) {
    Page* page =
        what == Register::kAll ? pager.find_or_register(*use.storage) : pager.table_.find(*use.storage);
    if (page == nullptr || !page->in_memory()) continue;
    page->last_use = pager.clock_;
    made.push_back(page);
    if (outermost) continue;
    pager.table_.pin(*page);  // an outer kernel may hold a raw pointer to it
    pinned_.push_back(page);
  }
  if (!outermost) return;
  for (Page* page : pinned_) pager.table_.unpin(*page);
  pinned_.clear();
  if (!pager.running_) return;
  if (position_ == StepFollower::kUntraced) {
    if (made.empty()) return;
    position_ = pager.step_.begin_operator(call.op.name, {});
    pager.step_.operator_runs(0, pager.needed_bytes(0));
  }
  pager.step_.end_operator(position_, made, pager.mover_.counts().waited_seconds);
  pager.move_ahead(position_);
}

void Pager::end_step() {
  if (!step_.end_step()) return;
  fetches_.clear();
  step_.make_plan(budget_bytes_, mover_.speeds());
}

// The plan is followed as far as memory and the tiers allow; what fails is told at the next allocation.
void Pager::move_ahead(std::size_t position) {
  const auto page_of = [&](std::uint32_t id) { return static_cast<Page*>(step_.learner().page(id)); };
  const c10::ArrayRef<SwapMove> moves = step_.moves(position);
  if (!step_.learner().following()) fetches_.clear();
  if (moves.empty() && fetches_.empty()) return;
  mover_.settle();
  try {
    for (const SwapMove& move : moves) {
      Page* page = page_of(move.page);
      if (page == nullptr) continue;
      if (move.kind == SwapMove::Kind::kFetch) {
        fetches_.push_back(move.page);
      } else {
        mover_.start_evict(*page);
      }
    }
    // In the order in which they are needed; what is still leaving has its room until it is gone.
    while (!fetches_.empty()) {
      Page* page = page_of(fetches_.front());
      if (page != nullptr && page->state == PageState::kAway) {
        if (alive_bytes(page->bytes) > budget_bytes_) break;
        mover_.start_fetch(*page);
      }
      fetches_.pop_front();
    }
  } catch (...) {
    mover_.keep_error(std::current_exception());
  }
}

}  // namespace reef
