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
  Direction direction;
  std::shared_ptr<Tier> tier;
  Tier::Slot slot;
  void* data;
  std::uint64_t bytes;
  bool hashed = true;  ///< whether Transfer::hash is wanted
  bool kept = false;   ///< the memory itself is kept: nothing is copied
  /// kOut: of what the slot holds. If it is that of the bytes, nothing is written (Transfer::same).
  std::optional<std::uint64_t> known_hash = std::nullopt;
  /// Gives `data`, on the thread that copies, right before it does; nullptr: there is nothing to copy.
  /// For memory of the host's, as the next.
  std::function<void*(Transfer&)> open = nullptr;
  TransferLane::Ended ended = nullptr;
};

/// "reef::evict to host, 4.00 MiB", for the profiler.
std::string name_of(const PageCopy& copy);

/// The memory that pages live in: a device's. How it is counted, bounded and copied.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual c10::Device device() const = 0;

  /// Whether the storage's block is of LibTorch's allocator for this memory, and is counted from now on.
  virtual bool counts(c10::StorageImpl& storage) = 0;
  /// Handed out by that allocator.
  virtual std::uint64_t alive_bytes() const = 0;
  /// The most of it since the last take_peak(), which begins anew.
  virtual std::uint64_t peak_bytes() const = 0;
  virtual std::uint64_t take_peak() = 0;

  /// From now on, `pager` is asked for room. Each memory has one pager.
  virtual void open(Pager& pager) = 0;
  /// Not more than this may be handed out; ~0: there is no limit.
  virtual void limit(std::uint64_t budget_bytes) = 0;
  /// Whether the pager is asked before every allocation, and not only when memory has run out: then room must
  /// be made ahead of the operators.
  virtual bool asks_before_allocations() const = 0;

  /// Blocks that were given back since the last call, where the pager is not told of each at once.
  virtual std::vector<const void*> take_freed() { return {}; }
  /// On which this thread's operators run.
  virtual std::uint64_t stream() const { return 0; }

  virtual c10::DataPtr allocate(std::uint64_t bytes) = 0;
  /// A block that its owner is giving back, and whose AllocationGate::freed() said that it stays: goes with
  /// the pointer.
  virtual c10::DataPtr take_over(const void* data) = 0;
  /// For Transfer::run() or start(). Neither waits nor copies.
  virtual std::shared_ptr<Transfer> prepare(const PageCopy& copy) = 0;
  std::shared_ptr<Transfer> start(const PageCopy& copy) {
    std::shared_ptr<Transfer> transfer = prepare(copy);
    transfer->start();
    return transfer;
  }
  /// Of what is there now, as a transfer gives it; 0 where reading it would cost more than it is worth.
  virtual std::uint64_t hash(const void* data, std::uint64_t bytes) const = 0;
};

std::unique_ptr<Memory> host_memory();
/// Throws ConfigError where there is no such device. (Twins: cuda_memory.cpp, no_cuda_memory.cpp.)
std::unique_ptr<Memory> cuda_memory(c10::DeviceIndex index);

}  // namespace reef
