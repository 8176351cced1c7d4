#include "page/no_address.h"

#include <string>
#include <utility>

#include "ledger/blocks.h"
#include "page/own_allocation.h"
#include "page/page_mover.h"
#include "page/pager.h"
#include "page/storage_access.h"
#include "reef/ledger.h"

namespace reef {
namespace {

// Keeps the owner of a page's memory alive while the page leaves or comes. It is null if another thread is
// freeing the owner; that thread will notify the pager. It must be made and dropped outside of all locks: if
// only Python has a reference to a storage, LibTorch takes the interpreter's lock for both.
using Hold = c10::intrusive_ptr<c10::StorageImpl>;

// The deleter of a storage whose page is away.
void storage_died(void* context) {
  const PagePtr page(static_cast<Page*>(context), /*add_ref=*/false);
  page->pager.storage_died(*page);
}

std::string refusal_of(const Page& page) {
  return (page.name.empty() ? "this tensor" : "'" + page.name + "'") +
         ": its memory is not in use just now. Its page was evicted by a reef::Budget, and it is accessed "
         "without an operator (a raw pointer, numpy, a file being written). Read it inside "
         "`with budget.whole(model, optimizer):` (reef::Budget::whole), clone it, or pin it first "
         "(reef::pin)";
}

// Returns whether no one else can use the memory. numpy() and sharing between processes make a storage
// non-resizable; a lazy clone moves its memory to another context.
bool may_leave(const Page& page, c10::StorageImpl& owner) {
  const c10::DataPtr& block = owner._mutable_data_ptr_no_checks();
  return block.get() == page.data && block.get_context() == page.data && owner.resizable();
}

// Takes the block from its owner, which throws from now on when it is asked for its memory. The returned
// block must be dropped outside the lock.
c10::DataPtr taken_from(Page& page, c10::StorageImpl& owner) {
  refuse_access(owner, refusal_of(page));
  c10::DataPtr block = std::move(owner._mutable_data_ptr_no_checks());
  intrusive_ptr_add_ref(&page);
  owner.set_data_ptr_noswap(c10::DataPtr(nullptr, &page, &storage_died, owner.device()));
  return block;
}

// Gives `block`, which holds the page's bytes, back to the owner. Returns `block` if the owner has other
// memory by now; it must be dropped outside the lock.
c10::DataPtr put_back(Page& page, c10::StorageImpl& owner, c10::DataPtr block) {
  c10::DataPtr& there = owner._mutable_data_ptr_no_checks();
  if (page_behind(there) != &page) return block;
  (void)there.release_context();
  intrusive_ptr_release(&page);  // The caller has another reference.
  owner.set_data_ptr_noswap(std::move(block));
  allow_access(owner);
  return {};
}

}  // namespace

Page* page_behind(const c10::DataPtr& block) {
  return block.get_deleter() == &storage_died ? static_cast<Page*>(block.get_context()) : nullptr;
}

// ---- which pages

void NoAddress::pages_of(c10::StorageImpl& storage, Visit visit, const Decision&) {
  if (Page* const page = table_.find(storage)) visit(*page);
}

void NoAddress::make_pages(Pager& pager, c10::StorageImpl& storage, Visit visit, Decision&) {
  if (Page* const page = table_.add(pager, *this, storage)) visit(*page);
}

// The page must be in memory and, if it is to be written, must not be read by a transfer.
bool NoAddress::is_there(const Page& page, bool writes) const {
  switch (page.state) {
    case PageState::kResident:
    case PageState::kClean:
      return !writes || !page.being_hashed;
    case PageState::kLeaving:
      return !writes;
    default:
      return false;
  }
}

// ---- out

PageWay::Place NoAddress::take_place(const Page& page, Tier& tier) {
  return {memory_.take_slot(tier, memory_.slot_bytes(page.bytes))};
}

// Lets a clean page leave without writing it. The memory is compared with the slot because only writes by
// operators are observed: code with a raw pointer, and compiled graphs, may have written to it.
bool NoAddress::leave_clean(const PagePtr& page) {
  PageCopy copy;
  std::optional<std::uint64_t> hash;
  {
    Decision decision(mutex_);
    if (page->state != PageState::kClean || mover_.wanted(*page)) return false;
    if (another_hashes(*page, decision)) return true;
    begin_hashing(*page, decision);
    copy = copy_out(page, decision);
    hash = page->hash;
  }
  const bool same = is_in_slot(*page, copy, hash);
  const Hold owner = page->storage.lock();
  Decision decision(mutex_);
  if (page->being_hashed) return true;
  if (page->state != PageState::kClean || mover_.wanted(*page)) return false;
  if (!owner) {
    table_.being_freed(*page);
    return true;
  }
  if (!may_leave(*page, *owner)) {
    forget(*page, decision, /*freed=*/false);
    return true;
  }
  if (!same) {
    ++mover_.counts(decision).unseen_writes;
    page->state = PageState::kResident;
    return false;
  }
  ++mover_.counts(decision).clean_evictions;
  take_away(*page, *owner, decision);
  mover_.left(*page);
  return true;
}

bool NoAddress::must_be_written(const PagePtr& page) {
  if (leave_clean(page)) return false;
  const Hold owner = page->storage.lock();
  Decision decision(mutex_);
  if (page->gone) return false;
  if (mover_.wanted(*page) || page->state != PageState::kResident) {
    table_.end_preparing(*page);
    return false;
  }
  if (!owner) {
    table_.being_freed(*page);
    return false;
  }
  if (may_leave(*page, *owner)) return true;
  forget(*page, decision, /*freed=*/false);
  return false;
}

PageCopy NoAddress::copy_out(const PagePtr& page, const Decision&) {
  PageCopy copy{PageCopy::Direction::kOut, page->tier, *page->slot, const_cast<void*>(page->data),
                page->bytes};
  copy.stream = page->stream;
  return copy;
}

void NoAddress::take_away(Page& page, c10::StorageImpl& owner, Decision& decision) {
  page.category = Blocks::instance().category_of(page.data).value_or(Category::kOther);
  table_.unplace(page);
  decision.drop(taken_from(page, owner));
}

// Returns whether another thread is hashing the page; if so, waits until it has done so.
bool NoAddress::another_hashes(const Page& page, Decision& decision) {
  if (!page.being_hashed) return false;
  wait_until_alone(page, decision);
  return true;
}

void NoAddress::begin_hashing(Page& page, const Decision&) {
  page.being_hashed = true;
  ++hashing_;
}

// Compares the page's current memory with its slot, and ends the hashing that the caller has begun.
bool NoAddress::is_in_slot(Page& page, const PageCopy& copy, std::optional<std::uint64_t> hash) {
  const bool same = memory_.is_in_slot(copy, hash);
  Decision decision(mutex_);
  page.being_hashed = false;
  --hashing_;
  hashed_.notify_all();
  if (page.gone && !page.being_read()) decision.drop(std::move(page.block));
  return same;
}

// Settles all cases that do not depend on the memory's content. Returns false if the page may leave.
bool NoAddress::ends_otherwise(Page& page, Transfer& transfer, Decision& decision) {
  if (page.transfer.get() != &transfer || page.state != PageState::kLeaving) return true;
  if (page.gone) {
    mover_.end_transfer(page, decision);
    mover_.drop_slot(page, decision);
    if (!page.being_hashed) decision.drop(std::move(page.block));
    return true;
  }
  if (!transfer.error && !transfer.cancelled && !mover_.wanted(page)) return false;
  mover_.stayed(page, transfer, decision);
  return true;
}

void NoAddress::settle_leaving(const PagePtr& page, Transfer& transfer) {
  PageCopy copy;
  {
    Decision decision(mutex_);
    if (ends_otherwise(*page, transfer, decision) || another_hashes(*page, decision)) return;
    begin_hashing(*page, decision);
    copy = copy_out(page, decision);
  }
  const bool same = is_in_slot(*page, copy, transfer.hash);
  const Hold owner = page->storage.lock();
  Decision decision(mutex_);
  if (page->being_hashed || ends_otherwise(*page, transfer, decision)) return;
  const bool mine = owner && may_leave(*page, *owner);
  if (mine && same && page->version == page->copied_version) {
    take_away(*page, *owner, decision);
    return mover_.left(*page, transfer, decision);
  }
  if (mine && !same) {
    ++mover_.counts(decision).unseen_writes;
    ++page->version;
  }
  mover_.stayed(*page, transfer, decision);
  if (owner && !mine) forget(*page, decision, /*freed=*/false);
}

// ---- in

c10::DataPtr NoAddress::allocate(const Page& page) {
  Category category = Category::kOther;
  {
    const Decision decision(mutex_);
    category = page.category;
  }
  const OwnAllocation own;
  const CategoryScope scope(category);
  return memory_.allocate(page.bytes, page.stream);
}

PageCopy NoAddress::copy_in(const PagePtr& page, const Decision&) {
  PageCopy copy{PageCopy::Direction::kIn, page->tier, *page->slot, page->block.get(), page->bytes};
  copy.stream = page->stream;
  return copy;
}

void NoAddress::settle_coming(const PagePtr& page, Transfer& transfer, c10::StorageImpl* owner) {
  const auto is_coming = [&] {
    return page->transfer.get() == &transfer && page->state == PageState::kComing;
  };
  {
    Decision decision(mutex_);
    if (!is_coming() || mover_.stays_away(*page, transfer, decision)) return;
  }
  const Hold hold = owner == nullptr ? page->storage.lock() : Hold();
  if (owner == nullptr) owner = hold.get();
  if (owner == nullptr) return;  // The thread that frees it will notify the pager.
  Decision decision(mutex_);
  if (!is_coming() || page->gone) return;
  const void* const data = page->block.get();
  if (c10::DataPtr rest = put_back(*page, *owner, std::move(page->block))) {
    mover_.end_transfer(*page, decision);
    decision.drop(std::move(rest));
    return table_.stayed_away(*page);
  }
  table_.place(*page, data);
  mover_.came(*page, transfer, decision);
}

// ---- the end

bool NoAddress::forget(Page& page, Decision& decision, bool freed) {
  if (page.gone) return false;
  const PagePtr keep(&page);
  const bool away = page.state == PageState::kAway || page.state == PageState::kComing;
  table_.remove(page);
  if (page.transfer) {
    // A device's allocator already has the block back; its streams must not write there before it has been
    // read.
    if (!freed && !away) page.transfer->wait();
    if (page.transfer->cancel() || page.transfer->done() || (!freed && !away)) {
      mover_.end_transfer(page, decision);
    }
  }
  const bool later = freed && page.being_read();
  if (later) page.block = memory_.take_over(page.data);
  if (page.transfer == nullptr) mover_.drop_slot(page, decision);
  if (page.transfer == nullptr && !later) decision.drop(std::move(page.block));
  return later;
}

}  // namespace reef
