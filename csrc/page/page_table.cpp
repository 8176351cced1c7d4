#include "page/page_table.h"

#include <utility>

#include "ledger/blocks.h"
#include "page/storage_access.h"

namespace reef {
namespace {

// Smaller storages stay where they are: moving one costs more than its bytes are worth.
constexpr std::uint64_t kSmallestPage = 1024;

constexpr const char* kAwayMessage =
    "this tensor's memory is not in use just now: its page was evicted by a reef::Budget and is accessed "
    "without an operator (a raw pointer, a file being written); pin the tensor (reef::pin) first, or end the "
    "budget";

c10::weak_intrusive_ptr<c10::StorageImpl> weak(c10::StorageImpl& storage) {
  return c10::weak_intrusive_ptr<c10::StorageImpl>(
      c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(&storage));
}

}  // namespace

// numpy() and sharing between processes make a storage non-resizable; a lazy clone hands its memory to a
// context of its own.
bool may_leave(const Page& page, c10::StorageImpl& storage) {
  const c10::DataPtr& block = storage._mutable_data_ptr_no_checks();
  return block.get() == page.data && block.get_context() == page.data && storage.resizable();
}

Page* PageTable::at(const void* data) const {
  const auto found = by_data_.find(data);
  return found == by_data_.end() ? nullptr : found->second;
}

Page* PageTable::find(c10::StorageImpl& storage) {
  const c10::DataPtr& block = storage._mutable_data_ptr_no_checks();
  if (block.get_deleter() == storage_died_) return static_cast<Page*>(block.get_context());
  Page* page = at(block.get());
  if (page != nullptr && page->storage._unsafe_get_target() != &storage) {
    page->storage = weak(storage);  // the block was handed from one storage to another
  }
  return page;
}

Page* PageTable::add(c10::StorageImpl& storage) {
  if (storage.device() != memory_.device() || !storage.resizable() || storage.nbytes() < kSmallestPage)
    return nullptr;
  const c10::DataPtr& block = storage._mutable_data_ptr_no_checks();
  if (block.get() == nullptr || block.get_context() != block.get()) return nullptr;
  if (!memory_.counts(storage)) return nullptr;
  auto page = std::make_unique<Page>();
  page->storage = weak(storage);
  page->data = block.get();
  page->bytes = storage.nbytes();
  page->index = pages_.size();
  by_data_.insert_or_assign(page->data, page.get());
  count(*page, true);
  pages_.push_back(std::move(page));
  return pages_.back().get();
}

void PageTable::remove(Page& page) {
  if (std::exchange(page.stays, false)) unpin(page);
  if (page.in_memory()) {
    // Its address may be another page's by now.
    if (page.state != PageState::kComing && at(page.data) == &page) by_data_.erase(page.data);
    count(page, false);
  }
  if (!page.dead) {
    if (page.state == PageState::kAway || page.state == PageState::kComing) count_away(page, false);
    learner_.died(page);
  }
  page.dead = true;
  if (page.pins > 0) return;
  const std::size_t index = page.index;
  std::swap(pages_[index], pages_.back());
  pages_[index]->index = index;
  pages_.pop_back();
}

void PageTable::count(const Page& page, bool there) {
  const std::uint64_t bytes = there ? page.bytes : -page.bytes;
  memory_bytes_ += bytes;
  if (page.pins == 0) evictable_bytes_ += bytes;
}

void PageTable::count_away(const Page& page, bool away) {
  away_bytes_ += away ? page.bytes : -page.bytes;
  Blocks::instance().sample(away_counter_, static_cast<std::int64_t>(away_bytes_));
}

void PageTable::pin(Page& page) {
  if (page.pins++ == 0 && page.in_memory()) evictable_bytes_ -= page.bytes;
}

void PageTable::unpin(Page& page) {
  if (--page.pins > 0) return;
  if (page.dead) return remove(page);
  if (page.in_memory()) evictable_bytes_ += page.bytes;
}

void PageTable::leave(Page& page, c10::StorageImpl& storage) {
  by_data_.erase(page.data);
  count(page, false);
  page.category = Blocks::instance().category_of(page.data).value_or(Category::kOther);
  page.state = PageState::kAway;
  count_away(page, true);
  refuse_access(storage, kAwayMessage);
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, &page, storage_died_, storage.device()));
}

void PageTable::take_block(Page& page, c10::DataPtr block) {
  page.block = std::move(block);
  page.state = PageState::kComing;
  count(page, true);
}

void PageTable::come(Page& page, c10::StorageImpl& storage) {
  page.data = page.block.get();
  page.state = PageState::kClean;
  count_away(page, false);
  by_data_.insert_or_assign(page.data, &page);
  storage._mutable_data_ptr_no_checks().release_context();
  storage.set_data_ptr_noswap(std::move(page.block));
  allow_access(storage);
}

void PageTable::give_up_block(Page& page) {
  count(page, false);
  page.state = PageState::kAway;
  page.block.clear();
}

}  // namespace reef
