#include "shard/packed_code.h"

#include <ATen/ops/empty.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/packed_levels.h"

namespace reef {

using at::Tensor;

Tensor empty_codes(int slices, std::int64_t elements, int bits) {
  return at::empty({slices * kernels::packed_bytes(elements, bits)}, at::TensorOptions().dtype(at::kByte));
}

std::uint8_t* code_of_slice(const Tensor& codes, int number, int count) {
  return codes.mutable_data_ptr<std::uint8_t>() + codes.numel() / count * number;
}

void sum_of_codes(const Tensor& codes, int count, int bits, const Tensor& to) {
  std::vector<const std::uint8_t*> parts;
  for (int number = 0; number < count; ++number) parts.push_back(code_of_slice(codes, number, count));
  kernels::sum_of_packed(parts, bits, to.numel(), to.mutable_data_ptr<float>());
}

// Slices consist of whole blocks, and a block begins with half its step.
bool any_nonfinite_block(const Tensor& codes, int bits) {
  const std::int64_t block_bytes = kernels::packed_bytes(kernels::kLevelBlock, bits);
  const auto* const packed = codes.const_data_ptr<std::uint8_t>();
  for (std::int64_t begin = 0; begin < codes.numel(); begin += block_bytes) {
    float half_step;
    std::memcpy(&half_step, packed + begin, sizeof half_step);
    if (!std::isfinite(half_step)) return true;
  }
  return false;
}

}  // namespace reef
