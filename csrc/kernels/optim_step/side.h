#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/optim_step.h"

namespace reef::kernels {

/// A copy of memory that belongs to a tile which is not whole: as large as a whole tile's, with zeros after
/// what was read. At most two parts of memory are read, each to a place of its own.
template <std::int64_t kBytes>
class Side {
 public:
  /// Gives the copy. Of no memory, or of no bytes, it gives back what it was given.
  std::byte* read(std::byte* whole, std::int64_t bytes, std::int64_t at = 0);
  void write() const;

 private:
  struct Part {
    std::byte* whole;
    std::byte* side;
    std::size_t bytes;
  };
  Part parts_[2];
  int count_ = 0;
  alignas(64) std::byte memory_[kBytes] = {};
};

/// One state of a tile that is not whole. Rank-1 scales stay where they are: they belong to all tiles.
class SideState {
 public:
  OptimState read(const OptimState& state, OptimFormat format, std::int64_t tile, std::int64_t elements);
  void write() const;

 private:
  Side<kTileElements * 4> codes_;
  Side<64> scales_;
};

/// A tile that is not whole, copied to the side, where it is tile 0 of tensor(): so that all other code works
/// on whole tiles only. write() copies the tile's own elements back.
class SideTile {
 public:
  SideTile(const OptimTensor& tensor, OptimFormat format, int states, std::int64_t tile);
  SideTile(const SideTile&) = delete;
  SideTile& operator=(const SideTile&) = delete;

  const OptimTensor& tensor() const { return tensor_; }
  void write() const;

 private:
  OptimTensor tensor_;
  int states_;
  Side<kTileElements * 4> gradient_, parameter_, master_;
  SideState of_states_[kMostStates];
};

/// Calls `work(tensor, first, last, elements)` with those of the tiles [first, last) that are whole, and then
/// with the one that is not, at the side; `elements` says how many each of these tiles has.
template <class Work>
void over_tiles(const OptimTensor& tensor, OptimFormat format, int states, std::int64_t first,
                std::int64_t last, const Work& work) {
  const std::int64_t whole = tensor.elements / kTileElements;
  work(tensor, first, last < whole ? last : whole, kTileElements);
  if (first >= last || last <= whole) return;
  SideTile side(tensor, format, states, whole);
  work(side.tensor(), 0, 1, tensor.elements - whole * kTileElements);
  side.write();
}

}  // namespace reef::kernels
