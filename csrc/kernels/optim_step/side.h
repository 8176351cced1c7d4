#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/optim_step.h"

namespace reef::kernels {

/// Memory of a tile that is not whole, worked on at the side as if it were, padded with zeros: nothing else
/// knows of such tiles.
template <std::int64_t kBytes>
class Side {
 public:
  /// Nothing of nowhere stays that.
  std::byte* read(std::byte* whole, std::int64_t bytes, std::int64_t at = 0) {
    if (whole == nullptr || bytes == 0) return whole;
    Part& part = parts_[count_++] = {whole, memory_ + at, static_cast<std::size_t>(bytes)};
    std::memcpy(part.side, whole, part.bytes);
    return memory_;
  }
  void write() const {
    for (int i = 0; i < count_; ++i) std::memcpy(parts_[i].whole, parts_[i].side, parts_[i].bytes);
  }

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

template <OptimFormat kFormat>
class SideState {
 public:
  OptimState read(const OptimState& state, std::int64_t tile, std::int64_t elements) {
    constexpr OptimFormat kPlain = uncompensated(kFormat);
    const std::int64_t before = tile * kTileElements;
    std::byte* const codes = state.codes + optim_codes_bytes(kFormat, before);
    const std::int64_t bytes = optim_codes_bytes(kPlain, elements);
    OptimState side = state;
    side.codes = codes_.read(codes, bytes);
    codes_.read(codes + bytes, optim_codes_bytes(kFormat, elements) - bytes,
                optim_codes_bytes(kPlain, kTileElements));
    side.first = before;
    const std::int64_t scale_bytes = optim_scales_bytes(kFormat, elements);
    if (scale_bytes > 0 && state.matrix.rows == 0)
      side.scales = scales_.read(state.scales + optim_scales_bytes(kFormat, before), scale_bytes);
    return side;
  }
  void write() const {
    codes_.write();
    scales_.write();
  }

 private:
  Side<kTileElements * 4> codes_;
  Side<64> scales_;
};

}  // namespace reef::kernels
