#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "reef/category.h"

namespace reef {

/// A block of memory that an allocator has handed out and not yet taken back.
struct Block {
  std::uint64_t address = 0;  ///< 0: an empty slot
  std::uint64_t bytes : 48 = 0;
  std::uint64_t device : 8 = 0;
  std::uint64_t category : 8 = 0;
};

/// Address -> Block. Open addressing with linear probing at a load of at most one half; erasing shifts the
/// followers back, so there are no tombstones and a lookup ends at the first empty slot. 16 bytes a slot.
class BlockTable {
 public:
  BlockTable() : slots_(kInitialSlots) {}

  /// The block at `address`, or nullptr. Valid until the next insert or erase.
  Block* find(std::uint64_t address) {
    for (std::size_t slot = home(address);; slot = next(slot)) {
      if (slots_[slot].address == 0) return nullptr;  // first, so that address 0 is never found
      if (slots_[slot].address == address) return &slots_[slot];
    }
  }

  /// `block.address` must not be in the table.
  void insert(const Block& block) {
    if (2 * (count_ + 1) > slots_.size()) grow();
    place(block);
    ++count_;
  }

  /// `block` as given by find().
  void erase(Block* block) {
    auto hole = static_cast<std::size_t>(block - slots_.data());
    for (std::size_t slot = next(hole); slots_[slot].address != 0; slot = next(slot)) {
      // A follower may fill the hole unless its home lies cyclically in (hole, slot].
      const std::size_t distance_home = (slot - home(slots_[slot].address)) & mask();
      const std::size_t distance_hole = (slot - hole) & mask();
      if (distance_home < distance_hole) continue;
      slots_[hole] = slots_[slot];
      hole = slot;
    }
    slots_[hole] = Block{};
    --count_;
  }

  std::size_t size() const { return count_; }

 private:
  static constexpr std::size_t kInitialSlots = 1024;

  std::size_t mask() const { return slots_.size() - 1; }
  std::size_t next(std::size_t slot) const { return (slot + 1) & mask(); }
  // Addresses are multiples of 64, so their low bits say nothing; Fibonacci hashing spreads the rest.
  std::size_t home(std::uint64_t address) const {
    return static_cast<std::size_t>((address * 0x9E3779B97F4A7C15u) >>
                                    (64 - std::countr_zero(slots_.size())));
  }

  void place(const Block& block) {
    std::size_t slot = home(block.address);
    while (slots_[slot].address != 0) slot = next(slot);
    slots_[slot] = block;
  }

  void grow() {
    std::vector<Block> old(slots_.size() * 2);
    old.swap(slots_);
    for (const Block& block : old) {
      if (block.address != 0) place(block);
    }
  }

  std::vector<Block> slots_;
  std::size_t count_ = 0;
};

}  // namespace reef
