#include "page/victims.h"

#include <algorithm>

namespace reef {

void Victims::add(Page& page) {
  order_.push_back(page);
  if (new_ == order_.end()) new_ = order_.iterator_to(page);
}

void Victims::remove(Page& page) {
  if (!has(page)) return;
  const auto at = order_.iterator_to(page);
  if (new_ == at) ++new_;
  order_.erase(at);
}

Page* Victims::first(bool known, std::uint64_t epoch) {
  if (order_.empty()) return nullptr;
  if (!known) return &order_.front();
  // Two attempts, because entries may be missing if next uses changed while the pages could leave. The second
  // one rebuilds the heap.
  for (int attempt = 0; attempt < 2; ++attempt) {
    if (epoch != epoch_ || attempt > 0 || heap_.size() > 2 * order_.size() + 64) {
      epoch_ = epoch;
      heap_.clear();
      new_ = order_.begin();
    }
    take_up();
    while (!heap_.empty()) {
      const Entry& top = heap_.front();
      Page& page = *top.page;
      if (has(page) && page.next_use == top.next_use && page.last_use == top.last_use) return &page;
      std::pop_heap(heap_.begin(), heap_.end());
      heap_.pop_back();
    }
  }
  return &order_.front();
}

void Victims::changed(Page& page) {
  if (has(page)) push(page);
}

void Victims::push(Page& page) {
  heap_.push_back({page.next_use, page.last_use, PagePtr(&page)});
  std::push_heap(heap_.begin(), heap_.end());
}

void Victims::take_up() {
  if (!heap_.empty()) {
    for (; new_ != order_.end(); ++new_) push(*new_);
    return;
  }
  for (; new_ != order_.end(); ++new_) heap_.push_back({new_->next_use, new_->last_use, PagePtr(&*new_)});
  std::make_heap(heap_.begin(), heap_.end());
}

}  // namespace reef
