#pragma once

#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdint>
#include <map>

#include "free_ranges.h"
#include "page/page.h"

namespace reef {

/// Maps blocks to pages, if addresses stay: a large block has pages of its own, one for each chunk; small
/// blocks share a slab, which is one page. Does no system calls; read and written under the pager's lock.
class PageHeap {
 public:
  /// Blocks smaller than a slab divided by this are put into slabs.
  static constexpr std::uint64_t kLeastInSlab = 4;

  struct Block {
    std::uint64_t bytes = 0;
    bool foreign = false;  ///< another allocator's block: only frames that lie completely in it are pages
    c10::SmallVector<PagePtr, 1> pages;
  };

  /// Returns the block that begins at `data`, or nullptr. Valid until the next block is added.
  Block* find(const void* data);
  void add(const void* data, Block block);
  /// Takes a block of `bytes` from a slab. Returns nullptr if no slab has room.
  void* take_small(std::uint64_t bytes);
  void add_slab(const PagePtr& slab);
  /// Removes a block. Returns the pages that end with it: its own, or the slab if it is empty now.
  c10::SmallVector<PagePtr, 1> remove(const void* data);

  /// Returns the page that contains this address, or nullptr.
  Page* at(std::uint64_t address) const;
  using Visit = c10::function_ref<void(Page&)>;
  /// Visits all pages that have bytes of [data, data + bytes), in ascending order of their addresses.
  void pages_of(const void* data, std::uint64_t bytes, Visit visit) const;
  /// Note that the page's bytes have left, or have come back. They call `visit` with each block in the page
  /// and the number of bytes that the ledger must subtract from the block, or add to it.
  using VisitBlock = c10::function_ref<void(const void* data, std::uint64_t bytes)>;
  void leave(Page& page, VisitBlock visit);
  void come(Page& page, VisitBlock visit);
  /// Returns how many bytes of the block are in memory, which is what the ledger counts for a new block.
  std::uint64_t counted_bytes(const void* data) const;
  /// Visits all blocks of other allocators.
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
  std::map<std::uint64_t, Page*> by_address_;  ///< pages by their start
  std::map<std::uint64_t, Slab> slabs_;        ///< slabs by their start
  FreeRanges holes_;                           ///< free ranges in slabs
  std::size_t foreign_count_ = 0;
};

}  // namespace reef
