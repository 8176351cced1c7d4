#include "page/page_table.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <utility>

#include "ledger/blocks.h"
#include "page/no_address.h"
#include "page/pager.h"
#include "page/storage_access.h"

namespace reef {
PageTable::PageTable(Memory& memory, StepLearner& learner)
    : memory_(memory), learner_(learner), away_counter_("bytes away (" + memory.device().str() + ")") {}

// ---- the set of pages

Page* PageTable::at(const void* data) const {
  const auto found = by_data_.find(data);
  return found == by_data_.end() ? nullptr : found->second;
}

// A block, or the data pointer that replaces it, may have been moved from one storage to another.
Page* PageTable::find(c10::StorageImpl& storage) {
  const c10::DataPtr& block = storage._mutable_data_ptr_no_checks();
  Page* page = page_behind(block);
  if (page == nullptr) page = at(block.get());
  if (page == nullptr || page->storage._unsafe_get_target() == &storage) return page;
  if (storage.nbytes() != page->bytes) return nullptr;  // The storage is only a part of the page.
  page->storage = weak(storage);
  if (page->preparing) end_preparing(*page);
  return page;
}

Page* PageTable::add(Pager& pager, PageWay& way, c10::StorageImpl& storage) {
  if (storage.device() != memory_.device() || !storage.resizable()) return nullptr;
  const c10::DataPtr& block = storage._mutable_data_ptr_no_checks();
  const void* const data = block.get();
  if (data == nullptr || block.get_context() != data || at(data) != nullptr) return nullptr;
  if (storage.nbytes() < Page::kLeastBytes || unknown_.contains(data) || !memory_.counts(storage))
    return nullptr;
  const PagePtr page(new Page(pager, way));
  page->storage = weak(storage);
  page->leaves_last = pager.addresses_stay();
  page->data = data;
  page->bytes = storage.nbytes();
  place(*page, data);
  add(page);
  return page.get();
}

void PageTable::add(const PagePtr& page) {
  page->index = pages_.size();
  pages_.push_back(page);
  if (!page->in_memory()) return count_away(*page, true);
  count(*page, true);
  victims_of(*page).add(*page);
}

void PageTable::remove(Page& page) {
  if (page.gone) return;
  end_preparing(page);
  if (page.in_memory()) {
    if (page.state != PageState::kComing) unplace(page);
    count(page, false);
  }
  if (page.state == PageState::kAway || page.state == PageState::kComing) count_away(page, false);
  victims_of(page).remove(page);
  unlist_pinned(page);
  learner_.died(page);
  page.gone = true;
  const PagePtr last = std::exchange(pages_.back(), nullptr);
  if (last->index != page.index) {
    pages_[page.index] = last;
    last->index = page.index;
  }
  pages_.pop_back();
}

// ---- pages that may leave

void PageTable::pin(Page& page) {
  if (page.pins++ > 0 || page.gone) return;
  victims_of(page).remove(page);
  if (page.in_memory()) evictable_bytes_ -= page.bytes;
  list_pinned(page);
}

void PageTable::unpin(Page& page) {
  if (--page.pins > 0 || page.gone) return;
  unlist_pinned(page);
  if (page.in_memory()) evictable_bytes_ += page.bytes;
  may_leave_again(page);
}

void PageTable::list_pinned(Page& page) {
  const bool is_there = page.state == PageState::kResident || page.state == PageState::kClean;
  if (page.frame_bytes > 0 && page.pins > 0 && is_there && !page.pinned.is_linked()) pinned_.push_back(page);
}

void PageTable::unlist_pinned(Page& page) {
  if (page.pinned.is_linked()) pinned_.erase(pinned_.iterator_to(page));
}

Page* PageTable::victim_but(c10::ArrayRef<PagePtr> spared, bool known, bool others_too) {
  c10::SmallVector<Page*, kTogether> aside;
  for (const PagePtr& page : spared) {
    if (!is_victim(*page)) continue;
    victims_of(*page).remove(*page);
    aside.push_back(page.get());
  }
  Page* const found = victim(known, others_too);
  for (Page* const page : aside) victims_of(*page).add(*page);
  return found;
}

Page* PageTable::pinned_victim(c10::ArrayRef<PagePtr> spared) const {
  if (pinned_.size() <= kTogether) return nullptr;
  const auto found = std::find_if(pinned_.begin(), pinned_.end(), [&](const Page& page) {
    return page.holds == 0 && !page.busy && !page.preparing &&
           std::none_of(spared.begin(), spared.end(), [&](const PagePtr& one) { return one == &page; });
  });
  return found == pinned_.end() ? nullptr : const_cast<Page*>(&*found);
}

void PageTable::busy(Page& page) {
  page.busy = true;
  pin(page);
  busy_.emplace_back(&page);
  end_preparing(page);
}

bool PageTable::retry_busy() {
  const std::vector<PagePtr> all = std::exchange(busy_, {});
  for (const PagePtr& page : all) {
    page->busy = false;
    unpin(*page);
  }
  return !all.empty();
}

void PageTable::may_leave_again(Page& page) {
  list_pinned(page);
  if (page.pins > 0 || page.preparing || !page.in_memory() || page.state == PageState::kLeaving) return;
  if (!is_victim(page)) victims_of(page).add(page);
}

void PageTable::begin_preparing(Page& page) {
  victims_of(page).remove(page);
  unlist_pinned(page);
  if (std::exchange(page.preparing, true)) return;
  preparing_.emplace_back(&page);
}

void PageTable::end_preparing(Page& page) {
  being_freed(page);
  page.preparing = false;
  page.leaves_pinned = false;
  if (!page.gone) may_leave_again(page);
}

void PageTable::being_freed(Page& page) {
  if (page.preparing) std::erase(preparing_, &page);
}

Page* PageTable::victim(bool known, bool others_too) {
  if (Page* page = victims_.first(known, learner_.epoch())) return page;
  if (others_too) {
    const auto other = std::find_if(preparing_.begin(), preparing_.end(), [](const PagePtr& page) {
      return page->pins == 0 && page->state != PageState::kLeaving;
    });
    if (other != preparing_.end()) return other->get();
  }
  return last_victims_.first(/*known=*/false, learner_.epoch());
}

void PageTable::unuse_unknown(const void* data) {
  const auto found = unknown_.find(data);
  if (found != unknown_.end() && --found->second == 0) unknown_.erase(found);
}

// ---- states of a page

void PageTable::count(const Page& page, bool there) {
  const std::uint64_t bytes = there ? page.bytes : -page.bytes;
  memory_bytes_ += bytes;
  if (page.learned) learned_bytes_ += bytes;
  if (page.pins == 0) evictable_bytes_ += bytes;
}

void PageTable::learned(Page& page) {
  page.learned = true;
  if (page.in_memory()) learned_bytes_ += page.bytes;
}

void PageTable::count_away(const Page& page, bool away) {
  away_bytes_ += away ? page.bytes : -page.bytes;
  Blocks::instance().sample(away_counter_, static_cast<std::int64_t>(away_bytes_));
}

void PageTable::left(Page& page) {
  victims_of(page).remove(page);
  unlist_pinned(page);
  count(page, false);
  page.state = PageState::kAway;
  count_away(page, true);
}

void PageTable::coming(Page& page) {
  page.state = PageState::kComing;
  count(page, true);
  may_leave_again(page);
}

void PageTable::came(Page& page) {
  page.state = page.slot ? PageState::kClean : PageState::kResident;
  list_pinned(page);
  count_away(page, false);
}

void PageTable::place(Page& page, const void* data) {
  page.data = data;
  by_data_.insert_or_assign(data, &page);
}

void PageTable::unplace(const Page& page) {
  if (const auto found = by_data_.find(page.data); found != by_data_.end() && found->second == &page)
    by_data_.erase(found);
}

void PageTable::stayed_away(Page& page) {
  victims_of(page).remove(page);
  count(page, false);
  page.state = PageState::kAway;
}

}  // namespace reef
