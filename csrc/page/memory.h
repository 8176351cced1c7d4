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
  Direction direction = Direction::kOut;
  std::shared_ptr<Tier> tier;
  Tier::Slot slot = 0;
  void* data = nullptr;
  std::uint64_t bytes = 0;
  /// Whether Memory::is_in_slot will be asked about the copy. If so, the slot has Memory::slot_bytes, and
  /// host memory sets Transfer::hash.
  bool hashed = true;
  bool kept = false;  ///< whether the memory itself is kept, so that nothing is copied
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
  /// Called before a budget begins. Throws ConfigError if it cannot begin now, and c10::Error if the device
  /// has no memory for what it needs.
  virtual void prepare_budget() {}

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
  /// Takes a slot of `bytes` from the tier, if it has room. Waits for the device if slots that were given
  /// back are not free before that.
  virtual std::optional<Tier::Slot> take_slot(Tier& tier, std::uint64_t bytes) { return tier.take(bytes); }
  /// Gives a slot back to its tier, once no copy that the device still has to finish uses it.
  virtual void give_back(const std::shared_ptr<Tier>& tier, Tier::Slot slot) noexcept {
    tier->give_back(slot);
  }
  /// Waits until all slots that were given back are back in their tiers.
  virtual void finish_copies() noexcept {}
  /// Prepares a copy and starts it.
  std::shared_ptr<Transfer> start(const PageCopy& copy) {
    std::shared_ptr<Transfer> transfer = prepare(copy);
    transfer->start();
    return transfer;
  }
  /// Returns the bytes of a page's slot: the page's own, and what the memory notes behind them.
  virtual std::uint64_t slot_bytes(std::uint64_t page_bytes) const { return page_bytes; }
  /// Returns whether the memory still holds what was copied to the slot by a copy like this one, which set
  /// `hash`: code that is not an operator may have written to the memory since. A device that can reach the
  /// slot returns true without waiting: it compares hashes in the order of the memory's stream, and writes
  /// the slot again if they differ. If it cannot reach the slot, the host waits for the stream.
  virtual bool is_in_slot(const PageCopy& copy, std::optional<std::uint64_t> hash) = 0;
  /// Returns how many slots a device has written again, up to the work that it has finished, since the budget
  /// began or reset_rewritten() was called.
  virtual std::uint64_t rewritten() noexcept { return 0; }
  virtual void reset_rewritten() noexcept {}
};

std::unique_ptr<Memory> host_memory();
/// Throws ConfigError if there is no such device. cuda_memory.cpp implements it, or no_cuda_memory.cpp in a
/// build without CUDA.
std::unique_ptr<Memory> cuda_memory(c10::DeviceIndex index);

}  // namespace reef
