#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "page/transfer.h"
#include "reef/tier.h"

namespace reef {

class Pager;

/// Describes a copy of a page between memory and a tier.
struct PageCopy {
  enum class Direction : std::uint8_t { kOut, kIn };
  Direction direction;
  std::shared_ptr<Tier> tier;
  Tier::Slot slot;
  void* data;
  std::uint64_t bytes;
  bool hashed = true;  ///< whether Transfer::hash is wanted
  bool kept = false;   ///< whether the memory itself is kept, so that nothing is copied
  /// kOut: the hash of what the slot holds. If the bytes have the same hash, nothing is written
  /// (Transfer::same).
  std::optional<std::uint64_t> known_hash = std::nullopt;
  /// Host memory only: called on the copying thread right before the copy. Returns the address to use instead
  /// of `data`, or nullptr if there is nothing to copy.
  std::function<void*(Transfer&)> open = nullptr;
  /// Host memory only: see TransferLane::Ended.
  TransferLane::Ended ended = nullptr;
  /// Device memory only: the stream that the memory belongs to (Memory::stream_of), or 0 for this thread's
  /// stream.
  std::uint64_t stream = 0;
};

/// Returns the copy's name in a profile, such as "reef::evict to host, 4.00 MiB".
std::string name_of(const PageCopy& copy);

/// The interface to the memory of a device: counts, bounds and copies it.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual c10::Device device() const = 0;

  /// Returns whether the storage's block is from LibTorch's allocator for this memory; if so, counts it from
  /// now on.
  virtual bool counts(c10::StorageImpl& storage) = 0;
  /// Returns the bytes that the allocator has handed out.
  virtual std::uint64_t alive_bytes() const = 0;
  /// Returns the most that was alive since the last call of take_peak().
  virtual std::uint64_t peak_bytes() const = 0;
  /// Returns the same, and resets the peak.
  virtual std::uint64_t take_peak() = 0;

  /// Begins to count, and makes the allocator ask `pager` for room. Each memory has one pager.
  virtual void open(Pager& pager) = 0;
  /// Bounds what the allocator may reserve under a budget of this many bytes, if it reserves more than it
  /// hands out.
  virtual void limit(std::uint64_t) {}
  /// Removes the bound.
  virtual void unlimit() noexcept {}
  /// Raises that bound, because fragmentation leaves no place for a block of `bytes` although there is room.
  /// Returns false if there is no bound.
  virtual bool reserve_more(std::uint64_t) { return false; }
  /// Throws ConfigError if a budget cannot begin now.
  virtual void check_may_begin() const {}

  /// Returns the blocks that were freed since the last call, if the pager is not told of each free
  /// immediately.
  virtual std::vector<const void*> take_freed() { return {}; }
  /// Waits for blocks that were freed while other streams still used them. Returns false if there are none.
  virtual bool finish_frees() { return false; }
  /// Returns the stream on which this thread's operators run, or 0 if the memory has no streams.
  virtual std::uint64_t stream() const { return 0; }
  /// Returns the stream for which the block was allocated, on which it is also freed.
  virtual std::uint64_t stream_of(const void*) const { return 0; }

  /// Allocates a block for `stream`, or for this thread's stream if it is 0.
  virtual c10::DataPtr allocate(std::uint64_t bytes, std::uint64_t stream = 0) = 0;
  /// Takes over a block that is being freed and for which AllocationGate::freed() returned true. The block is
  /// freed when the returned pointer is destroyed.
  virtual c10::DataPtr take_over(const void* data) = 0;
  /// Prepares a copy for Transfer::run() or start(). Neither waits nor copies.
  virtual std::shared_ptr<Transfer> prepare(const PageCopy& copy) = 0;
  /// Prepares a copy and starts it.
  std::shared_ptr<Transfer> start(const PageCopy& copy) {
    std::shared_ptr<Transfer> transfer = prepare(copy);
    transfer->start();
    return transfer;
  }
  /// Returns the hash that a transfer of the bytes would have, or 0 if reading them would cost more than it
  /// saves.
  virtual std::uint64_t hash(const void* data, std::uint64_t bytes) const = 0;
};

std::unique_ptr<Memory> host_memory();
/// Throws ConfigError if there is no such device. cuda_memory.cpp implements it, or no_cuda_memory.cpp in a
/// build without CUDA.
std::unique_ptr<Memory> cuda_memory(c10::DeviceIndex index);

}  // namespace reef
