#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace reef {

/// Tensors of what kernels/packed_levels.h packs: bytes.
/// Room for the codes of so many slices of `elements` elements each.
at::Tensor empty_codes(int slices, std::int64_t elements, int bits);
std::uint8_t* code_of_slice(const at::Tensor& codes, int number, int count);
/// `to`, float32, becomes the sum of what so many codes say, in their order.
void sum_of_codes(const at::Tensor& codes, int count, int bits, const at::Tensor& to);
/// Whether a block's step is NaN, as it is where an element of the block is not finite.
bool any_nonfinite_block(const at::Tensor& codes, int bits);

}  // namespace reef
