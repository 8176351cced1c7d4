#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/optim_step.h"

namespace reef::kernels {

/// A copy of the memory of a tile that is not whole. The copy has the size of a whole tile and is padded with
/// zeros. At most two parts of memory can be read, each to a different place.
template <std::int64_t kBytes>
class Side {
 public:
  /// Copies `bytes` bytes of `whole` to offset `at` and returns the beginning of the copy. Returns `whole` if
  /// it is null or `bytes` is 0.
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

/// A copy of one state of a tile that is not whole. Rank-1 scales are not copied, because all tiles share
/// them.
class SideState {
 public:
  OptimState read(const OptimState& state, OptimFormat format, std::int64_t tile, std::int64_t elements);
  void write() const;

 private:
  Side<kTileElements * 4> codes_;
  Side<64> scales_;
};

/// A copy of a tile that is not whole, padded to a whole tile, so that all other code works on whole tiles
/// only. The copy is tile 0 of tensor(). write() copies the tile's own elements back.
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

/// Calls `work(tensor, first, last, elements)` for those of the tiles [first, last) that are whole, and then
/// for a padded copy of the one that is not. `elements` is the number of elements in each of these tiles.
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
