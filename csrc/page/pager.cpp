#include "page/pager.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <utility>

#include "ledger/blocks.h"
#include "page/pager_entry.h"
#include "reef/bytes.h"
#include "reef/error.h"
#include "reef/ledger.h"

namespace reef {
namespace {

constexpr std::uint64_t kLeastSlackBytes = std::uint64_t{16} << 20;

c10::Device indexed(c10::Device device) {
  if (device.is_cuda() && !device.has_index()) device.set_index(0);
  return device;
}

// By slot; each is made when it is first asked for.
constinit std::array<std::atomic<Pager*>, kDeviceSlots> pagers{};

}  // namespace

Pager& Pager::of(c10::Device device) {
  device = indexed(device);
  const auto slot = slot_of(device);
  if (!slot)
    throw ConfigError("there is no budget for " + device.str() + "; only for cpu and cuda:0 to cuda:15");
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  std::atomic<Pager*>& pager = pagers[*slot];
  if (pager == nullptr) pager = new Pager(device.is_cpu() ? host_memory() : cuda_memory(device.index()));
  return *pager;
}

Pager* Pager::running(c10::Device device) {
  const auto slot = slot_of(indexed(device));
  Pager* const pager = slot ? pagers[*slot].load() : nullptr;
  return pager != nullptr && pager->running_ ? pager : nullptr;
}

Pager& Pager::cpu() {
  static Pager& pager = of(c10::kCPU);
  return pager;
}

Pager::Pager(std::unique_ptr<Memory> memory)
    : slot_(*slot_of(memory->device())),
      memory_(std::move(memory)),
      table_(*memory_, &Pager::storage_died, step_.learner()),
      mover_(table_, *memory_) {
  Blocks::instance();  // its lock is taken after ours, at a fork too
  if (!device().is_cpu()) return;
  // A forked child (a data loader's worker) has none of the tiers' threads, and its memory is not ours to
  // bound.
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

Pager::Frame& Pager::this_threads_frame() const {
  static thread_local std::array<Frame, kDeviceSlots> frames;
  return frames[slot_];
}

std::string Pager::running_operator() const {
  const std::string* op = this_threads_frame().op();
  return op == nullptr ? std::string("outside any operator") : "operator " + *op;
}

// ---- beginning and end

void Pager::start(PagerOptions options) {
  const Entry entry(*this);
  if (running_) {
    throw ConfigError("a budget for " + device().str() +
                      " is in force already; end it first, or change it by set_bytes()");
  }
  budget_bytes_ = options.budget_bytes;
  minimum_bytes_ = 0;
  ++starts_;
  mover_.set_tiers(std::move(options.tiers));
  step_.begin(options.prefetch);
  fetches_.clear();
  running_ = true;
  memory_->open(*this);
}

void Pager::stop() {
  const Entry entry(*this);
  take_freed();
  budget_bytes_ = ~std::uint64_t{0};
  memory_->limit(budget_bytes_);
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
  memory_->limit(~std::uint64_t{0});
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
  take_freed();
  const std::uint64_t before = budget_bytes_.exchange(bytes);
  try {
    make_room(0);
    memory_->limit(bytes);
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
  return step_.learner().trace();
}

std::uint64_t Pager::fixed_bytes() const {
  const Entry entry(*this);
  return step_.fixed_bytes();
}

std::vector<std::shared_ptr<Tier>> Pager::tiers() const {
  const Entry entry(*this);
  return mover_.tiers();
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
  Pager& pager = *static_cast<Page*>(page)->pager;
  const auto forget = [&] { pager.mover_.forget(*static_cast<Page*>(page)); };
  if (inside) return forget();
  const Entry entry(pager);
  forget();
}

// Where the allocator tells of it later, under a lock of its own.
void Pager::take_freed() {
  for (const void* data : memory_->take_freed()) {
    Page* page = table_.at(data);
    if (page == nullptr || page->dead) continue;
    const c10::intrusive_ptr<c10::StorageImpl> storage = page->storage.lock();
    if (!storage || storage->_mutable_data_ptr_no_checks().get() != data) mover_.forget(*page);
  }
}

// ---- pages

Page* Pager::find_or_register(c10::StorageImpl& storage) {
  if (Page* known = table_.find(storage)) return known;
  Page* page = table_.add(storage);
  if (page == nullptr) return nullptr;
  page->pager = this;
  page->stream = memory_->stream();
  page->last_use = ++clock_;
  step_.learner().made(*page);
  return page;
}

void Pager::adopt(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const Entry entry(*this);
  take_freed();
  Page* page = find_or_register(*tensor.storage().unsafeGetStorageImpl());
  if (page == nullptr) return;
  page->made_in_step = 0;
  page->parameter = tensor.requires_grad() && tensor.is_leaf();
}

void Pager::pin(const at::Tensor& tensor) {
  const Entry entry(*this);
  take_freed();
  Page* page = find_or_register(*tensor.storage().unsafeGetStorageImpl());
  if (page == nullptr) return;
  make_resident(*page);
  if (page->state == PageState::kClean) page->state = PageState::kResident;  // whoever pins may write
  table_.pin(*page);
}

void Pager::unpin(const at::Tensor& tensor) {
  const Entry entry(*this);
  Page* page = table_.find(*tensor.storage().unsafeGetStorageImpl());
  if (page == nullptr || page->pins == 0) return;
  table_.unpin(*page);
  // Of what is freed while it sleeps it would not hear.
  if (!running_ && page->pins == 0) mover_.forget(*page);
}

void Pager::make_resident(Page& page) {
  if (page.dead) return;
  mover_.finish(page);
  if (page.state != PageState::kAway || page.storage.expired()) return;
  make_room(page.bytes);
  for (;;) {
    try {
      return mover_.fetch(page);
    } catch (const c10::OutOfMemoryError&) {  // the bytes are there, but not side by side
      Page* other = memory_->asks_before_allocations() ? nullptr : victim();
      if (other == nullptr) throw;
      if (!push_out(*other)) throw;
    }
  }
}

// ---- what was alive

void Pager::see_peak() {
  const std::uint64_t peak = memory_->take_peak();
  own_mark_.peak_bytes = std::max(own_mark_.peak_bytes, peak);
  for (Mark* mark : marks_) mark->peak_bytes = std::max(mark->peak_bytes, peak);
}

void Pager::add(Mark& mark) {
  const Entry entry(*this);
  marks_.push_back(&mark);
}

void Pager::remove(Mark& mark) {
  const Entry entry(*this);
  std::erase(marks_, &mark);
}

void Pager::set(Mark& mark) {
  const Entry entry(*this);
  see_peak();
  mark = {memory_->alive_bytes(), mover_.evicted_bytes(), starts_};
}

std::optional<std::int64_t> Pager::left_bytes(const Mark& mark) {
  const Entry entry(*this);
  see_peak();
  if (!running_) return std::nullopt;
  if (mark.start != starts_) return 0;
  if (const std::uint64_t evicted = mover_.evicted_bytes() - mark.evicted_bytes; evicted > 0)
    return -static_cast<std::int64_t>(evicted);
  return static_cast<std::int64_t>(budget_bytes_ - std::min<std::uint64_t>(budget_bytes_, mark.peak_bytes));
}

std::uint64_t Pager::peak_bytes() {
  const Entry entry(*this);
  see_peak();
  return own_mark_.peak_bytes;
}

void Pager::reset_peak() {
  const Entry entry(*this);
  see_peak();
  own_mark_.peak_bytes = memory_->alive_bytes();
}

// ---- room

std::uint64_t Pager::alive_bytes(std::uint64_t bytes) const {
  return memory_->alive_bytes() + reserved_bytes_ + bytes;
}

// Beside what is alive: up to the budget, or the most that was ever alive, and a little more, without which
// blocks of many sizes would hardly ever fit where others have left.
std::uint64_t Pager::kept_bytes(std::uint64_t bytes) const {
  const std::uint64_t peak = std::max(own_mark_.peak_bytes, memory_->peak_bytes());
  const std::uint64_t most = std::min<std::uint64_t>(budget_bytes_, peak);
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
    if (!push_out(*page)) refuse_without_tier(*page, bytes);
  }
}

// False if no tier has room.
bool Pager::push_out(Page& page) {
  mover_.finish(page);  // it may be coming: fetched too early
  return mover_.evict(page);
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

// Room for what the running operator will allocate, where nobody asks when it does: as its last run did, or
// as much again as it reads.
void Pager::make_room_ahead(std::size_t position, const StepFollower::Uses& uses) {
  std::uint64_t bytes = 0;
  if (step_.learner().following() && position < step_.learner().trace().operators.size()) {
    const Trace& trace = step_.learner().trace();
    const std::uint64_t pinned = table_.memory_bytes() - table_.evictable_bytes();
    const std::uint64_t working_set = working_set_bytes(trace, position);
    bytes = working_set - std::min(working_set, pinned);
  } else {
    for (const auto& use : uses) bytes += use.page->bytes;
  }
  const std::uint64_t most = budget_bytes_ - std::min<std::uint64_t>(budget_bytes_, needed_bytes(0));
  make_room(std::min(bytes, most));  // if it needs more, its allocation is refused
}

// A block belongs to the stream that it was allocated on; on another, it could be given away while in use.
void Pager::check_stream(Page& page, std::uint64_t stream) {
  if (page.stream == stream || page.stays) return;
  page.stays = true;
  table_.pin(page);
}

bool Pager::free_some(std::uint64_t bytes) noexcept {
  if (!running_ || inside) return false;
  // The allocator's lock is held: another thread with this lock may be waiting for that one.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  inside = true;
  std::uint64_t freed = 0;
  try {
    while (freed < bytes) {
      const std::uint64_t before = table_.memory_bytes();
      if (!mover_.settle_one()) {
        Page* page = victim();
        if (page == nullptr) break;
        if (!push_out(*page)) break;
      }
      freed += before - table_.memory_bytes();
    }
  } catch (...) {
    mover_.keep_error(std::current_exception());
  }
  inside = false;
  return freed > 0;
}

void Pager::refuse_allocation(std::uint64_t bytes) {
  const Entry entry(*this);
  if (const std::exception_ptr error = mover_.take_error()) std::rethrow_exception(error);
  minimum_bytes_ = std::max(minimum_bytes_, needed_bytes(bytes));
  refuse(bytes);
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

}  // namespace reef
