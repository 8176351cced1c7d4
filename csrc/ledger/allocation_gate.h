#pragma once

#include <c10/util/UniqueVoidPtr.h>

#include <atomic>
#include <cstddef>

namespace reef {

/// Stands before the counting allocator's memory. Called on any thread, outside every lock of the ledger.
class AllocationGate {
 public:
  /// May make room, and throws to refuse. True: after_allocate() must follow, whatever the allocation comes
  /// to.
  virtual bool before_allocate(std::size_t bytes) = 0;
  virtual void after_allocate(std::size_t bytes) noexcept = 0;
  /// Memory for the block, if the gate has its own; nullptr: LibTorch's allocator is asked.
  virtual void* allocate(std::size_t bytes) = 0;
  /// Whether allocate() may give memory now.
  virtual bool gives_memory() const noexcept = 0;
  /// `data` is about to be given back. True: not now, since it is being read; the gate gives it back later,
  /// by given_back_later().
  virtual bool freed(const void* data) noexcept = 0;
  /// Whether the gate itself tells Blocks of this block of its own, and counts what of it is alive
  /// (count_alive()).
  virtual bool counts_itself(const void* data) const noexcept = 0;
  /// Takes it back; false if it is not the gate's own.
  virtual bool take_back(void* data) noexcept = 0;

 protected:
  ~AllocationGate() = default;
};

/// The one that is there; nullptr: none. A gate must outlive the process: blocks are freed until its end.
inline constinit std::atomic<AllocationGate*> allocation_gate{nullptr};

/// Whether a gate gives memory now, as it does within a budget of the CPU.
inline bool gate_gives_memory() noexcept {
  const AllocationGate* const gate = allocation_gate.load(std::memory_order_acquire);
  return gate != nullptr && gate->gives_memory();
}

/// What deletes counted blocks, if it is LibTorch's own allocator that the counting one wraps; else nullptr.
inline constinit std::atomic<c10::DeleterFnPtr> counted_deleter{nullptr};

}  // namespace reef
