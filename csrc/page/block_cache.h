#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "fork.h"
#include "free_ranges.h"

namespace reef {

/// Memory for large blocks, mapped by ourselves: a heap keeps what is freed between blocks that live on, so
/// that a process within its budget would still grow. What is freed is kept for the next blocks, as far as
/// the owner allows, and then goes back to the system, whatever lives beside it. Thread-safe.
class BlockCache {
 public:
  /// Smaller ones are the heap's.
  static constexpr std::size_t kSmallestBlock = std::size_t{128} << 10;

  BlockCache() = default;
  ~BlockCache();  ///< blocks that are in use stay
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  /// From what is kept if it fits there, else new, and then at most `kept_bytes` stay. nullptr if the system
  /// has none. Aligned to a memory page; its content is anything, and the system has memory for what is
  /// touched.
  void* allocate(std::size_t bytes, std::uint64_t kept_bytes);
  /// False if it is no block of ours.
  bool free(void* data) noexcept;
  /// Gives back to the system until at most so many bytes are kept.
  void trim(std::uint64_t kept_bytes) noexcept;

  std::uint64_t kept_bytes() const { return kept_bytes_.load(std::memory_order_relaxed); }

 private:
  void trim_locked(std::uint64_t kept_bytes) noexcept;

  MutexAtFork mutex_{AtFork::Order::kBlocks};
  std::unordered_map<const void*, std::size_t> in_use_;
  FreeRanges kept_;
  std::atomic<std::uint64_t> kept_bytes_ = 0;  ///< of it, for whoever has no lock
};

}  // namespace reef
