#pragma once

#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdint>
#include <map>

#include "free_ranges.h"
#include "page/page.h"

namespace reef {

/// Which pages hold which blocks, where addresses stay: a large block has pages of its own, one for each
/// chunk; small ones lie together in a slab, which is one page. Pure but for the pages; read and written
/// under the pager's lock.
class PageHeap {
 public:
  /// Blocks that are smaller than this part of a slab lie in slabs.
  static constexpr std::uint64_t kLeastInSlab = 4;

  struct Block {
    std::uint64_t bytes = 0;
    bool foreign = false;  ///< another allocator's: only the frames that it fills are pages
    c10::SmallVector<PagePtr, 1> pages;
  };

  /// nullptr: there is none that begins at `data`. Valid until the next block is added.
  Block* find(const void* data);
  void add(const void* data, Block block);
  /// Takes a block of `bytes` in a slab; nullptr if no slab has room.
  void* take_small(std::uint64_t bytes);
  void add_slab(const PagePtr& slab);
  /// The block goes. Gives the pages that go with it: its own, or the slab that it leaves empty.
  c10::SmallVector<PagePtr, 1> remove(const void* data);

  /// The page that has this address, or nullptr.
  Page* at(std::uint64_t address) const;
  using Visit = c10::function_ref<void(Page&)>;
  /// All pages that have bytes of [data, data + bytes), in the order of their addresses.
  void pages_of(const void* data, std::uint64_t bytes, Visit visit) const;
  /// Notes that the page's bytes have left, or have come back, and calls `visit` with each block that lies in
  /// the page and with the bytes that the ledger must take away from it, or add to it.
  using VisitBlock = c10::function_ref<void(const void* data, std::uint64_t bytes)>;
  void leave(Page& page, VisitBlock visit);
  void come(Page& page, VisitBlock visit);
  /// Gives the bytes of the block that are in memory; the ledger counts a new block with these.
  std::uint64_t counted_bytes(const void* data) const;
  /// All blocks of other allocators.
  void foreign_blocks(c10::function_ref<void(Block&)> visit);
  std::size_t foreign_count() const { return foreign_count_; }

 private:
  struct Small {
    std::uint64_t bytes;
    bool away = false;
  };
  struct Slab {
    std::uint64_t used_bytes = 0;
    std::map<const void*, Small> blocks;
  };

  boost::unordered_flat_map<const void*, Block> blocks_;
  std::map<std::uint64_t, Page*> by_address_;  ///< the start of each
  std::map<std::uint64_t, Slab> slabs_;        ///< the same of slabs
  FreeRanges holes_;                           ///< of slabs
  std::size_t foreign_count_ = 0;
};

}  // namespace reef
