#include "page/page_heap.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "round_up.h"

namespace reef {
namespace {

// LibTorch's kernels expect this alignment. The first bytes of a slab, as many as this, are never used, so
// that no hole spans two slabs.
constexpr std::uint64_t kBlockAlignment = 64;

std::uint64_t start_of(const void* data) { return reinterpret_cast<std::uint64_t>(data); }

}  // namespace

PageHeap::Block* PageHeap::find(const void* data) {
  const auto found = blocks_.find(data);
  return found == blocks_.end() ? nullptr : &found->second;
}

void PageHeap::add(const void* data, Block block) {
  for (const PagePtr& page : block.pages) by_address_.emplace(start_of(page->data), page.get());
  if (block.foreign) ++foreign_count_;
  blocks_.emplace(data, std::move(block));
}

// ---- small blocks

void* PageHeap::take_small(std::uint64_t bytes) {
  const std::uint64_t size = round_up(bytes, kBlockAlignment);
  const auto start = holes_.take(size, kBlockAlignment);
  if (!start) return nullptr;
  const auto [begin, page] = *std::prev(by_address_.upper_bound(*start));
  Slab& slab = slabs_.at(begin);
  slab.used_bytes += size;
  void* const data = reinterpret_cast<void*>(*start);
  const bool away = page->state == PageState::kAway || page->state == PageState::kComing;
  slab.blocks.emplace(data, Small{bytes, away});
  blocks_.emplace(data, Block{bytes, false, {PagePtr(page)}});
  return data;
}

void PageHeap::add_slab(const PagePtr& slab) {
  const std::uint64_t start = start_of(slab->data);
  by_address_.emplace(start, slab.get());
  slabs_.emplace(start, Slab{});
  holes_.add(start + kBlockAlignment, slab->frame_bytes - kBlockAlignment);
}

c10::SmallVector<PagePtr, 1> PageHeap::remove(const void* data) {
  const auto found = blocks_.find(data);
  c10::SmallVector<PagePtr, 1> pages = std::move(found->second.pages);
  if (found->second.foreign) --foreign_count_;
  const std::uint64_t bytes = found->second.bytes;
  blocks_.erase(found);
  const auto slab = slabs_.find(start_of(pages.front()->data));
  if (slab != slabs_.end()) {
    const std::uint64_t size = round_up(bytes, kBlockAlignment);
    slab->second.blocks.erase(data);
    slab->second.used_bytes -= size;
    holes_.add(start_of(data), size);
    if (slab->second.used_bytes > 0) return {};
    holes_.take_at(slab->first + kBlockAlignment, pages.front()->frame_bytes - kBlockAlignment);
    slabs_.erase(slab);
  }
  for (const PagePtr& page : pages) by_address_.erase(start_of(page->data));
  return pages;
}

std::uint64_t PageHeap::counted_bytes(const void* data) const {
  const Block& block = blocks_.at(data);
  std::uint64_t bytes = 0;
  for (const PagePtr& page : block.pages) {
    const auto slab = slabs_.find(start_of(page->data));
    if (slab != slabs_.end()) return slab->second.blocks.at(data).away ? 0 : block.bytes;
    if (!page->counted_away) bytes += page->bytes;
  }
  return bytes;
}

// ---- search by address

Page* PageHeap::at(std::uint64_t where) const {
  const auto after = by_address_.upper_bound(where);
  if (after == by_address_.begin()) return nullptr;
  Page* const page = std::prev(after)->second;
  return where < start_of(page->data) + page->frame_bytes ? page : nullptr;
}

void PageHeap::pages_of(const void* data, std::uint64_t bytes, Visit visit) const {
  if (const auto found = blocks_.find(data); found != blocks_.end() && found->second.bytes == bytes) {
    for (const PagePtr& page : found->second.pages) visit(*page);
    return;
  }
  auto page = by_address_.upper_bound(start_of(data));
  if (page != by_address_.begin() && at(start_of(data)) != nullptr) --page;
  for (; page != by_address_.end() && page->first < start_of(data) + bytes; ++page) visit(*page->second);
}

void PageHeap::leave(Page& page, VisitBlock visit) {
  const auto slab = slabs_.find(start_of(page.data));
  if (slab == slabs_.end()) {
    page.counted_away = true;
    return visit(page.block_start, page.bytes);
  }
  for (auto& [data, small] : slab->second.blocks) {
    small.away = true;
    visit(data, small.bytes);
  }
}

void PageHeap::come(Page& page, VisitBlock visit) {
  const auto slab = slabs_.find(start_of(page.data));
  if (slab == slabs_.end()) {
    if (std::exchange(page.counted_away, false)) visit(page.block_start, page.bytes);
    return;
  }
  for (auto& [data, small] : slab->second.blocks) {
    if (std::exchange(small.away, false)) visit(data, small.bytes);
  }
}

void PageHeap::foreign_blocks(c10::function_ref<void(Block&)> visit) {
  for (auto& [data, block] : blocks_) {
    if (block.foreign) visit(block);
  }
}

}  // namespace reef
