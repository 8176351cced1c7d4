#include "page/pager.h"

#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "ledger/birth.h"
#include "ledger/blocks.h"
#include "ledger/counting_allocator.h"
#include "page/storage_access.h"
#include "reef/bytes.h"
#include "reef/error.h"
#include "reef/ledger.h"

namespace reef {
namespace {

// Smaller storages stay where they are: moving one costs more than its bytes are worth.
constexpr std::uint64_t kSmallestPage = 1024;

constexpr const char* kAwayMessage =
    "this tensor's memory is not in use just now: its page was evicted by a reef::Budget and is accessed "
    "without an "
    "operator (a raw pointer, a file being written); pin the tensor (reef::pin) first, or end the budget";

thread_local bool inside = false;         // this thread holds the pager's lock
thread_local std::exception_ptr pending;  // an operator's page could not be brought in

std::string running_operator() {
  const std::string* op = this_threads_birth().op;
  return op == nullptr ? std::string("outside any operator") : "operator " + *op;
}

class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds), started_(std::chrono::steady_clock::now()) {}
  ~Stopwatch() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point started_;
};

bool in_memory(const Page& page) { return page.state != PageState::kAway && !page.dead; }

// Whether `storage` still holds the page's memory alone and may lose it. numpy() and sharing between
// processes make a storage non-resizable; a lazy clone hands its memory to a context of its own.
bool may_leave(const Page& page, c10::StorageImpl& storage) {
  const c10::DataPtr& block = storage._mutable_data_ptr_no_checks();
  return block.get() == page.data && block.get_context() == page.data && storage.resizable();
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
Pager::Pager() {
  Blocks::instance();  // its lock is taken after ours, at a fork too
  pthread_atfork([] { cpu().mutex_.lock(); }, [] { cpu().mutex_.unlock(); },
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
// ----------------------------------------------------------------------------------------------

void Pager::start(std::uint64_t budget_bytes, std::vector<std::shared_ptr<Tier>> tiers) {
  const Entry entry(*this);
  if (running_) {
    throw ConfigError("a budget for the CPU is in force already; end it first, or change it by set_bytes()");
  }
  budget_bytes_ = budget_bytes;
  tiers_ = std::move(tiers);
  counts_ = {};
  running_ = true;
  set_allocation_gate(this);
}

void Pager::stop() {
  const Entry entry(*this);
  budget_bytes_ = ~std::uint64_t{0};
  std::exception_ptr error;
  for (std::size_t i = pages_.size(); i-- > 0;) {
    Page& page = *pages_[i];
    try {
      if (page.state == PageState::kAway) make_resident(page);
    } catch (...) {
      error = std::current_exception();
      continue;
    }
    drop(page);
  }
  if (error) std::rethrow_exception(error);
  running_ = false;
}

void Pager::abandon() noexcept {
  const Entry entry(*this);
  running_ = false;
}

std::uint64_t Pager::budget_bytes() const {
  const Entry entry(*this);
  return budget_bytes_;
}

void Pager::set_budget_bytes(std::uint64_t bytes) {
  const Entry entry(*this);
  const std::uint64_t before = std::exchange(budget_bytes_, bytes);
  try {
    make_room(0);
  } catch (...) {
    budget_bytes_ = before;
    throw;
  }
}

PagerCounts Pager::counts() const {
  const Entry entry(*this);
  return counts_;
}

void Pager::reset_counts() {
  const Entry entry(*this);
  counts_ = {};
}

// ---- the allocator's side
// -------------------------------------------------------------------------------------------

bool Pager::before_allocate(std::size_t bytes) {
  if (inside || !running_) return false;
  if (pending) std::rethrow_exception(std::exchange(pending, nullptr));
  const Entry entry(*this);
  make_room(bytes);
  reserved_bytes_ += bytes;
  return true;
}

void Pager::after_allocate(std::size_t bytes) noexcept {
  const Entry entry(*this);
  reserved_bytes_ -= bytes;
}

void Pager::freed(const void* data) noexcept {
  if (!running_) return;
  const auto forget = [&] {
    const auto found = by_data_.find(data);
    if (found != by_data_.end()) drop(*found->second);
  };
  if (inside) return forget();
  const Entry entry(*this);
  forget();
}

// The storage of an evicted page is gone.
void Pager::storage_died(void* page) {
  if (inside) return cpu().drop(*static_cast<Page*>(page));
  const Entry entry(cpu());
  cpu().drop(*static_cast<Page*>(page));
}

// ---- pages
// ----------------------------------------------------------------------------------------------------------

Page* Pager::find(c10::StorageImpl& storage) {
  const c10::DataPtr& block = storage._mutable_data_ptr_no_checks();
  if (block.get_deleter() == &Pager::storage_died) return static_cast<Page*>(block.get_context());
  const auto found = by_data_.find(block.get());
  if (found == by_data_.end()) return nullptr;
  Page* page = found->second;
  if (page->storage._unsafe_get_target() != &storage) {  // the block was handed from one storage to another
    page->storage = c10::weak_intrusive_ptr<c10::StorageImpl>(
        c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(&storage));
  }
  return page;
}

Page* Pager::find_or_register(c10::StorageImpl& storage) {
  if (Page* known = find(storage)) return known;
  if (storage.device_type() != c10::kCPU || !storage.resizable() || storage.nbytes() < kSmallestPage)
    return nullptr;
  const c10::DataPtr& block = storage._mutable_data_ptr_no_checks();
  if (block.get() == nullptr || block.get_context() != block.get()) return nullptr;
  if (!Blocks::instance().category_of(block.get()) && !reef::adopt(storage)) return nullptr;
  auto page = std::make_unique<Page>();
  page->storage = c10::weak_intrusive_ptr<c10::StorageImpl>(
      c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(&storage));
  page->data = block.get();
  page->bytes = storage.nbytes();
  page->last_use = ++clock_;
  page->index = pages_.size();
  by_data_.emplace(page->data, page.get());
  evictable_bytes_ += page->bytes;
  pages_.push_back(std::move(page));
  return pages_.back().get();
}

void Pager::drop(Page& page) {
  if (!page.dead) {
    if (page.state != PageState::kAway) {
      by_data_.erase(page.data);
      if (page.pins == 0) evictable_bytes_ -= page.bytes;
    }
    if (page.slot) page.tier->give_back(*page.slot);
    page.slot.reset();
    page.dead = true;
  }
  if (page.pins > 0) return;
  const std::size_t index = page.index;
  std::swap(pages_[index], pages_.back());
  pages_[index]->index = index;
  pages_.pop_back();
}

void Pager::add_pin(Page& page) {
  if (page.pins++ == 0 && in_memory(page)) evictable_bytes_ -= page.bytes;
}

void Pager::drop_pin(Page& page) {
  if (--page.pins > 0) return;
  if (page.dead) return drop(page);
  if (in_memory(page)) evictable_bytes_ += page.bytes;
}

void Pager::adopt(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const Entry entry(*this);
  find_or_register(*tensor.storage().unsafeGetStorageImpl());
}

void Pager::pin(const at::Tensor& tensor) {
  const Entry entry(*this);
  Page* page = find_or_register(*tensor.storage().unsafeGetStorageImpl());
  if (page == nullptr) return;
  make_resident(*page);
  add_pin(*page);
}

void Pager::unpin(const at::Tensor& tensor) {
  const Entry entry(*this);
  Page* page = find(*tensor.storage().unsafeGetStorageImpl());
  if (page != nullptr && page->pins > 0) drop_pin(*page);
}

// ---- room
// -----------------------------------------------------------------------------------------------------------

// What would be alive with every page away that could be.
std::uint64_t Pager::needed_bytes(std::uint64_t bytes) const {
  return static_cast<std::uint64_t>(allocator_live_bytes()) + reserved_bytes_ + bytes - evictable_bytes_;
}

void Pager::make_room(std::uint64_t bytes) {
  const std::uint64_t needed = needed_bytes(bytes);
  counts_.minimum_bytes = std::max(counts_.minimum_bytes, needed);
  const auto over = [&] {
    return static_cast<std::uint64_t>(allocator_live_bytes()) + reserved_bytes_ + bytes > budget_bytes_;
  };
  if (!over()) return;
  while (needed <= budget_bytes_ && over()) {
    Page* page = victim();
    if (page == nullptr) break;
    evict(*page);
  }
  if (!over()) return;
  std::uint64_t pinned = 0;
  for (const auto& page : pages_) {
    if (page->pins > 0 && in_memory(*page)) pinned += page->bytes;
  }
  const std::uint64_t least = needed_bytes(bytes);
  throw BudgetError(running_operator() + " is out of memory. It works on " + format_bytes(pinned + bytes) +
                        " of pages at once, and " + format_bytes(least - pinned - bytes) +
                        " of other memory is alive that cannot leave, in a budget of " +
                        format_bytes(budget_bytes_) + "; give at least " + std::to_string(least) +
                        " bytes (Budget::set_bytes, or a new budget)",
                    least);
}

Page* Pager::victim() {
  Page* oldest = nullptr;
  for (const auto& page : pages_) {
    if (!in_memory(*page) || page->pins > 0) continue;
    if (oldest != nullptr && oldest->last_use <= page->last_use) continue;
    if (page->storage.expired()) continue;  // being freed by another thread
    oldest = page.get();
  }
  return oldest;
}

void Pager::write_out(Page& page, const void* data) {
  if (!page.slot) {
    for (const auto& tier : tiers_) {
      page.slot = tier->take(page.bytes);
      if (!page.slot) continue;
      page.tier = tier;
      break;
    }
  }
  if (!page.slot) {
    std::string full;
    for (const auto& tier : tiers_) {
      full += (full.empty() ? "" : ", ") + tier->name() + " " + format_bytes(tier->use().used_bytes) +
              " of " + format_bytes(tier->use().capacity_bytes);
    }
    throw BudgetError(running_operator() + " is out of memory. A page of " + format_bytes(page.bytes) +
                          " must leave, and no tier has room for it (" + full +
                          "); give a larger tier, or one more (a disk)",
                      needed_bytes(0));
  }
  try {
    page.tier->write(*page.slot, data);
  } catch (...) {
    page.tier->give_back(*page.slot);
    page.slot.reset();
    throw;
  }
  counts_.bytes_out += page.bytes;
}

void Pager::evict(Page& page) {
  const c10::intrusive_ptr<c10::StorageImpl> storage = page.storage.lock();
  if (!storage || !may_leave(page, *storage)) return drop(page);  // no page of ours any longer
  const Stopwatch watch(counts_.waited_seconds);
  page.category = Blocks::instance().category_of(page.data).value_or(Category::kOther);
  if (page.state == PageState::kResident) write_out(page, page.data);
  ++counts_.evictions;
  if (page.state == PageState::kClean) ++counts_.clean_evictions;
  by_data_.erase(page.data);
  evictable_bytes_ -= page.bytes;
  page.state = PageState::kAway;
  refuse_access(*storage, kAwayMessage);
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, &page, &Pager::storage_died, storage->device()));
}

void Pager::make_resident(Page& page) {
  if (page.state != PageState::kAway || page.dead) return;
  const c10::intrusive_ptr<c10::StorageImpl> storage = page.storage.lock();
  if (storage) fault(page, *storage);
}

void Pager::fault(Page& page, c10::StorageImpl& storage) {
  const Stopwatch watch(counts_.waited_seconds);
  make_room(page.bytes);
  c10::DataPtr block;
  {
    const CategoryScope category(page.category);
    block = c10::GetCPUAllocator()->allocate(page.bytes);
  }
  page.tier->read(*page.slot, block.get());
  ++counts_.faults;
  counts_.bytes_in += page.bytes;
  page.data = block.get();
  page.state = PageState::kClean;
  by_data_.emplace(page.data, &page);
  if (page.pins == 0) evictable_bytes_ += page.bytes;
  storage._mutable_data_ptr_no_checks().release_context();
  storage.set_data_ptr_noswap(std::move(block));
  allow_access(storage);
}

// ---- operators
// ------------------------------------------------------------------------------------------------------

bool Pager::Frame::enter(c10::ArrayRef<Use> uses, Register what) {
  Pager& pager = cpu();
  const Entry entry(pager);
  if (depth_++ == 0) {
    pending = nullptr;
    ++pager.clock_;
  }
  if (!pager.running_) return false;
  const bool known = std::any_of(uses.begin(), uses.end(),
                                 [&](const Use& use) { return pager.find(*use.storage) != nullptr; });
  const std::size_t first = pinned_.size();
  // All are pinned before the first is faulted in: making room for one must not push out another.
  for (const Use& use : uses) {
    const bool may_register =
        what == Register::kAll || (what == Register::kWrittenWithAKnown && known && use.writes);
    Page* page = may_register ? pager.find_or_register(*use.storage) : pager.find(*use.storage);
    if (page == nullptr) continue;
    page->last_use = pager.clock_;
    pager.add_pin(*page);
    pinned_.push_back(page);
    if (page->state == PageState::kAway) continue;
    if (use.writes) page->state = PageState::kResident;
  }
  for (std::size_t i = first; i < pinned_.size(); ++i) {
    Page& page = *pinned_[i];
    if (page.state != PageState::kAway || page.dead) continue;
    try {
      pager.make_resident(page);
    } catch (const std::exception& error) {
      if (!pending) pending = std::current_exception();
      if (const auto storage = page.storage.lock()) refuse_access(*storage, message_of(error));
    }
  }
  for (const Use& use : uses) {
    if (!use.writes) continue;
    Page* page = pager.find(*use.storage);
    if (page != nullptr && page->state == PageState::kClean) page->state = PageState::kResident;
  }
  return known;
}

void Pager::Frame::leave(c10::ArrayRef<Use> results, Register what) noexcept {
  Pager& pager = cpu();
  const Entry entry(pager);
  for (const Use& use : pager.running_ ? results : c10::ArrayRef<Use>{}) {
    Page* page = what == Register::kAll ? pager.find_or_register(*use.storage) : pager.find(*use.storage);
    if (page == nullptr || !in_memory(*page)) continue;
    page->last_use = pager.clock_;
    // An outer kernel may hold a raw pointer to it.
    if (depth_ > 1) {
      pager.add_pin(*page);
      pinned_.push_back(page);
    }
  }
  if (--depth_ > 0) return;
  for (Page* page : pinned_) pager.drop_pin(*page);
  pinned_.clear();
  pending = nullptr;
}

}  // namespace reef
