#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "fork.h"
#include "free_ranges.h"

namespace reef {

/// Allocates large blocks by mmap(). A heap cannot return memory that was freed between blocks in use, so a
/// process within its budget would still grow. This cache keeps freed blocks for later ones, up to a limit of
/// the owner, and returns the rest to the system, whatever blocks are in use beside it. Thread-safe.
class BlockCache {
 public:
  /// Smaller blocks belong to the heap.
  static constexpr std::size_t kSmallestBlock = std::size_t{128} << 10;

  BlockCache() = default;
  ~BlockCache();  ///< leaves blocks in use mapped
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  /// Allocates a block from what is kept or, if it does not fit there, from the system; then keeps at most
  /// `kept_bytes`. Returns nullptr if the system has no memory. The block is aligned to a memory page and has
  /// arbitrary content; physical memory is allocated when it is touched.
  void* allocate(std::size_t bytes, std::uint64_t kept_bytes);
  /// Frees a block. Returns false if `data` is not a block of this cache.
  bool free(void* data) noexcept;
  /// Returns memory to the system until at most `kept_bytes` are kept.
  void trim(std::uint64_t kept_bytes) noexcept;

  std::uint64_t kept_bytes() const { return kept_bytes_.load(std::memory_order_relaxed); }

 private:
  void trim_locked(std::uint64_t kept_bytes) noexcept;

  MutexAtFork mutex_{AtFork::Order::kBlocks};
  std::unordered_map<const void*, std::size_t> in_use_;
  FreeRanges kept_;
  std::atomic<std::uint64_t> kept_bytes_ = 0;  ///< bytes of `kept_`, readable without the lock
};

}  // namespace reef
