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

/// One page's bytes, between memory and a tier.
struct PageCopy {
  enum class Direction : std::uint8_t { kOut, kIn };
  Direction direction = Direction::kOut;
  std::shared_ptr<Tier> tier;
  Tier::Slot slot = 0;
  void* data = nullptr;
  std::uint64_t bytes = 0;
  /// Whether it is to be known if the memory still holds what the slot does (Memory::is_in_slot): the slot
  /// then has Memory::slot_bytes, and host memory gives Transfer::hash.
  bool hashed = true;
  bool kept = false;  ///< the memory itself is kept, and nothing is copied
  /// kOut: the hash of what the slot holds. If the bytes have the same, nothing is written (Transfer::same).
  std::optional<std::uint64_t> known_hash = std::nullopt;
  /// Host memory only: called on the thread that copies, right before it does. Returns what to use for
  /// `data`, or nullptr if there is nothing to copy.
  std::function<void*(Transfer&)> open = nullptr;
  /// Host memory only: see TransferLane::Ended.
  TransferLane::Ended ended = nullptr;
  /// A device's memory only: the stream that the memory belongs to (Memory::stream_of); 0: this thread's.
  std::uint64_t stream = 0;
};

/// The copy's name in a profile: "reef::evict to host, 4.00 MiB".
std::string name_of(const PageCopy& copy);

/// The memory of a device: how it is counted, bounded and copied.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual c10::Device device() const = 0;

  /// Whether the storage's block is from LibTorch's allocator for this memory; if so, counts it from now on.
  virtual bool counts(c10::StorageImpl& storage) = 0;
  /// Returns the bytes that the allocator has handed out.
  virtual std::uint64_t alive_bytes() const = 0;
  /// Returns the most that was alive since the last call of take_peak().
  virtual std::uint64_t peak_bytes() const = 0;
  /// Returns the same, and begins anew.
  virtual std::uint64_t take_peak() = 0;

  /// Counts, and makes the allocator ask `pager` for room, from now on. Each memory has one pager.
  virtual void open(Pager& pager) = 0;
  /// Bounds what the allocator may reserve for a budget of so many bytes, if it reserves more than it hands
  /// out.
  virtual void limit(std::uint64_t) {}
  /// Removes the bound.
  virtual void unlimit() noexcept {}
  /// Raises that bound, because a block of `bytes` finds no place between others although there is room.
  /// Returns false if nothing bounds it.
  virtual bool reserve_more(std::uint64_t) { return false; }
  /// Before a budget begins. Throws ConfigError where none can, and what a device throws that has no memory.
  virtual void prepare_budget() {}

  /// Returns the blocks that were freed since the last call, where the pager is not told of each at once.
  virtual std::vector<const void*> take_freed() { return {}; }
  /// Waits until blocks are free that were freed while other streams used them. Returns false if there are
  /// none.
  virtual bool finish_frees() { return false; }
  /// Returns the stream on which this thread's operators run; 0 where there are none.
  virtual std::uint64_t stream() const { return 0; }
  /// Returns the stream to which the allocator gave the block, and gives it back.
  virtual std::uint64_t stream_of(const void*) const { return 0; }

  /// Returns a block for `stream`; 0: this thread's.
  virtual c10::DataPtr allocate(std::uint64_t bytes, std::uint64_t stream = 0) = 0;
  /// Takes over a block that is being freed and for which AllocationGate::freed() returned true. The block is
  /// freed with the pointer.
  virtual c10::DataPtr take_over(const void* data) = 0;
  /// Prepares a copy for Transfer::run() or start(). Neither waits nor copies.
  virtual std::shared_ptr<Transfer> prepare(const PageCopy& copy) = 0;
  /// Gives a slot back to its tier, as soon as no copy that the host has not waited for works on it.
  virtual void give_back(const std::shared_ptr<Tier>& tier, Tier::Slot slot) noexcept {
    tier->give_back(slot);
  }
  /// Waits until the tiers have all slots that were given back. Returns false if they had.
  virtual bool finish_copies() noexcept { return false; }
  /// Prepares a copy and starts it.
  std::shared_ptr<Transfer> start(const PageCopy& copy) {
    std::shared_ptr<Transfer> transfer = prepare(copy);
    transfer->start();
    return transfer;
  }
  /// Bytes of the slot of a page: its own, and what the memory notes behind them.
  virtual std::uint64_t slot_bytes(std::uint64_t page_bytes) const { return page_bytes; }
  /// Says whether the memory holds what a copy like this one has written to the slot, of which the transfer
  /// has given `hash`: code without operators may have written to it. A device that can reach the slot says
  /// yes, and writes the slot again if it has to, behind what the memory's stream has been given so far;
  /// where it cannot, the host waits for the stream.
  virtual bool is_in_slot(const PageCopy& copy, std::optional<std::uint64_t> hash) = 0;
  /// How often, since the budget began or reset_rewritten(), a device has found that it had to: as far as it
  /// has got.
  virtual std::uint64_t rewritten() noexcept { return 0; }
  virtual void reset_rewritten() noexcept {}
};

std::unique_ptr<Memory> host_memory();
/// Throws ConfigError if there is no such device. cuda_memory.cpp implements it, or no_cuda_memory.cpp in a
/// build without CUDA.
std::unique_ptr<Memory> cuda_memory(c10::DeviceIndex index);

}  // namespace reef
