#include "page/no_address.h"

#include <string>
#include <utility>

#include "ledger/blocks.h"
#include "page/own_allocation.h"
#include "page/pager.h"
#include "page/storage_access.h"
#include "reef/ledger.h"

namespace reef {
namespace {

// What keeps the owner of a page's memory alive while the page leaves or comes; nullptr: it is being freed by
// another thread, which will tell. Taken and dropped outside every lock: where only Python has a reference to
// a storage, LibTorch takes the interpreter's lock for both.
using Hold = c10::intrusive_ptr<c10::StorageImpl>;

// The storage of a page that is away is gone.
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

// numpy() and sharing between processes make a storage non-resizable; a lazy clone hands its memory to a
// context of its own.
bool may_leave(const Page& page, c10::StorageImpl& owner) {
  const c10::DataPtr& block = owner._mutable_data_ptr_no_checks();
  return block.get() == page.data && block.get_context() == page.data && owner.resizable();
}

// From now on whoever asks the owner for the memory is refused. Gives the block, to be dropped outside the
// lock.
c10::DataPtr take_away(Page& page, c10::StorageImpl& owner) {
  refuse_access(owner, refusal_of(page));
  c10::DataPtr block = std::move(owner._mutable_data_ptr_no_checks());
  intrusive_ptr_add_ref(&page);
  owner.set_data_ptr_noswap(c10::DataPtr(nullptr, &page, &storage_died, owner.device()));
  return block;
}

// `block` has the page's bytes, and is the owner's from now on. Gives what it had instead, to be dropped
// outside the lock.
c10::DataPtr put_back(Page& page, c10::StorageImpl& owner, c10::DataPtr block) {
  c10::DataPtr& there = owner._mutable_data_ptr_no_checks();
  if (page_behind(there) != &page) return block;  // it has other memory by now
  (void)there.release_context();
  intrusive_ptr_release(&page);  // the caller has another
  owner.set_data_ptr_noswap(std::move(block));
  allow_access(owner);
  return {};
}

}  // namespace

Page* page_behind(const c10::DataPtr& block) {
  return block.get_deleter() == &storage_died ? static_cast<Page*>(block.get_context()) : nullptr;
}

// ---- which pages

void NoAddressMover::pages_of(c10::StorageImpl& storage, Visit visit, const Decision&) {
  if (Page* const page = table_.find(storage)) visit(*page);
}

void NoAddressMover::make_pages(Pager& pager, c10::StorageImpl& storage, Visit visit, Decision&) {
  if (Page* const page = table_.add(pager, storage)) visit(*page);
}

// In memory, and if it is to be written, read by nobody.
bool NoAddressMover::is_there(const Page& page, bool writes) const {
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

bool NoAddressMover::evict(const PagePtr& page, Way way) {
  if (let_it_come(page)) return true;
  std::vector<std::shared_ptr<Tier>> tiers;
  {
    const Decision decision(mutex_);
    tiers = tiers_for(*page, decision);
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
bool NoAddressMover::leave_clean(const PagePtr& page) {
  {
    Decision decision(mutex_);
    if (page->state != PageState::kClean || wanted(*page)) return false;
    if (another_hashes(*page, decision)) return true;
    page->being_hashed = true;
  }
  const std::uint64_t hash = hash_of(*page);
  const Hold owner = page->storage.lock();
  Decision decision(mutex_);
  if (page->being_hashed) return true;
  if (page->state != PageState::kClean || wanted(*page)) return false;
  const bool same = hash == page->hash;
  if (!owner) {
    table_.being_freed(*page);
    return true;
  }
  if (!may_leave(*page, *owner)) {
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
bool NoAddressMover::may_be_written(const PagePtr& page) {
  const Hold owner = page->storage.lock();
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
  if (may_leave(*page, *owner)) return true;
  forget(*page, decision, /*freed=*/false);
  return false;
}

// nullptr: the tier has no room, or the page is wanted.
std::shared_ptr<Transfer> NoAddressMover::begin_leaving(const PagePtr& page,
                                                        const std::shared_ptr<Tier>& tier, Way way) {
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

void NoAddressMover::leave(Page& page, c10::StorageImpl& owner, Decision& decision) {
  page.category = Blocks::instance().category_of(page.data).value_or(Category::kOther);
  table_.unplace(page);
  left(page);
  decision.drop(take_away(page, owner));
}

// Another thread is at it, and will have seen the same when this returns.
bool NoAddressMover::another_hashes(const Page& page, Decision& decision) {
  if (!page.being_hashed) return false;
  wait_until_alone(page, decision);
  return true;
}

// Of its memory as it is now; ends what the caller has begun.
std::uint64_t NoAddressMover::hash_of(Page& page) {
  const std::uint64_t hash = memory_.hash(page.data, page.bytes);
  Decision decision(mutex_);
  page.being_hashed = false;
  hashed_.notify_all();
  if (page.gone && !page.being_read()) decision.drop(std::move(page.block));
  return hash;
}

// What is known without looking at its memory; false: it may leave.
bool NoAddressMover::stays(Page& page, const std::shared_ptr<Transfer>& transfer, Decision& decision) {
  if (page.transfer != transfer || page.state != PageState::kLeaving) return true;  // another has settled it
  if (!transfer->error && !transfer->cancelled && !wanted(page)) return false;
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
  } else if (transfer->cancelled) {
    has_copy(page);
  } else {
    count_out(page, *transfer);
    page.hash = transfer->hash;
    has_copy(page);
    if (page.version == page.copied_version) page.state = PageState::kClean;
  }
  table_.end_preparing(page);
  return true;
}

void NoAddressMover::settle_leaving(const PagePtr& page, const std::shared_ptr<Transfer>& transfer) {
  {
    Decision decision(mutex_);
    if (stays(*page, transfer, decision) || another_hashes(*page, decision)) return;
    page->being_hashed = true;
  }
  const bool same = hash_of(*page) == transfer->hash;
  const Hold owner = page->storage.lock();
  Decision decision(mutex_);
  if (page->being_hashed || stays(*page, transfer, decision)) return;
  count_out(*page, *transfer);
  page->hash = transfer->hash;
  end_leaving(*page, decision);
  has_copy(*page);
  if (!owner) return table_.being_freed(*page);
  if (!may_leave(*page, *owner)) {
    forget(*page, decision, /*freed=*/false);
  } else if (same && page->version == page->copied_version) {
    leave(*page, *owner, decision);
  } else {
    ++counts_.unseen_writes;
    table_.end_preparing(*page);
  }
}

c10::DataPtr NoAddressMover::allocate(const Page& page) {
  const OwnAllocation own;
  const CategoryScope category(page.category);
  return memory_.allocate(page.bytes);
}

void NoAddressMover::settle_coming(const PagePtr& page, const std::shared_ptr<Transfer>& transfer,
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
  const Hold hold = owner == nullptr ? page->storage.lock() : Hold();
  if (owner == nullptr) owner = hold.get();
  if (owner == nullptr) return;  // whoever frees it will tell
  Decision decision(mutex_);
  if (page->transfer != transfer || page->state != PageState::kComing || page->gone) return;
  const void* const data = page->block.get();
  end_coming(*page, decision);
  if (c10::DataPtr rest = put_back(*page, *owner, std::move(page->block))) {
    decision.drop(std::move(rest));
    return table_.stayed_away(*page);
  }
  count_in(*page, *transfer);
  table_.place(*page, data);
  table_.came(*page);
  has_copy(*page);
}

}  // namespace reef
