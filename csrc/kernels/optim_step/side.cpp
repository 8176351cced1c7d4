#include "kernels/optim_step/side.h"

#include <algorithm>
#include <cstring>

#include "kernels/optim_step/rounding.h"

// Compiled in a source of its own, for any processor. The linker could take an inline function from a source
// that is compiled for an instruction set that this processor lacks.
namespace reef::kernels {

template <std::int64_t kBytes>
std::byte* Side<kBytes>::read(std::byte* whole, std::int64_t bytes, std::int64_t at) {
  if (whole == nullptr || bytes == 0) return whole;
  Part& part = parts_[count_++] = {whole, memory_ + at, static_cast<std::size_t>(bytes)};
  std::memcpy(part.side, whole, part.bytes);
  return memory_;
}

template <std::int64_t kBytes>
void Side<kBytes>::write() const {
  for (int i = 0; i < count_; ++i) std::memcpy(parts_[i].whole, parts_[i].side, parts_[i].bytes);
}

OptimState SideState::read(const OptimState& state, OptimFormat format, std::int64_t tile,
                           std::int64_t elements) {
  const OptimFormat plain = uncompensated(format);
  const std::int64_t before = tile * kTileElements;
  std::byte* const codes = state.codes + optim_codes_bytes(format, before);
  const std::int64_t bytes = optim_codes_bytes(plain, elements);
  OptimState side = state;
  side.codes = codes_.read(codes, bytes);
  // Rounding errors follow the codes; in the copy they follow the codes of a whole tile.
  codes_.read(codes + bytes, optim_codes_bytes(format, elements) - bytes,
              optim_codes_bytes(plain, kTileElements));
  side.first = state.first + before;
  if (state.matrix.rows > 0) return side;
  const std::int64_t scale_bytes = optim_scales_bytes(format, elements);
  if (scale_bytes > 0)
    side.scales = scales_.read(state.scales + optim_scales_bytes(format, before), scale_bytes);
  return side;
}

void SideState::write() const {
  codes_.write();
  scales_.write();
}

SideTile::SideTile(const OptimTensor& tensor, OptimFormat format, int states, std::int64_t tile)
    : tensor_(tensor), states_(states) {
  tensor_.key += static_cast<std::uint32_t>(tile) * kTileKey;
  const std::int64_t elements = std::min(kTileElements, tensor.elements - tile * kTileElements);
  const auto read = [&](auto& to, std::byte* whole, std::int64_t bytes) {
    return whole == nullptr ? whole : to.read(whole + tile * kTileElements * bytes, elements * bytes);
  };
  tensor_.gradient =
      read(gradient_, const_cast<std::byte*>(tensor.gradient), optim_dtype_bytes(tensor.gradient_dtype));
  tensor_.parameter = read(parameter_, tensor.parameter, optim_dtype_bytes(tensor.parameter_dtype));
  tensor_.master = read(master_, tensor.master, optim_master_bytes(tensor.master_kind));
  for (int i = 0; i < states; ++i) {
    tensor_.states[i] = of_states_[i].read(tensor.states[i], format, tile, elements);
  }
}

void SideTile::write() const {
  parameter_.write();
  master_.write();
  for (int i = 0; i < states_; ++i) of_states_[i].write();
}

}  // namespace reef::kernels
