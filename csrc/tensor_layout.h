#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace reef {

/// How a dense tensor lies in memory. Kernels choose by it in which order they sum, so the bits of their
/// results depend on it.
struct TensorLayout {
  static constexpr std::int64_t kAlignment = 64;  ///< bytes; allocators give no less

  std::vector<std::int64_t> strides = {};
  std::int64_t misaligned_elements = 0;  ///< from a multiple of kAlignment to the first element

  friend bool operator==(const TensorLayout&, const TensorLayout&) = default;
};

/// Returns how a tensor lies. It has a storage.
TensorLayout layout_of(const at::Tensor& tensor);

/// Whether a tensor lies in order, from an aligned address on, as one that is made anew.
bool lies_in_order(const at::Tensor& tensor);

/// Returns the tensor if it lies so, or a copy that does, without a graph. Elements that share memory (of
/// expand()) share it there, too.
at::Tensor with_layout(const at::Tensor& tensor, const TensorLayout& layout);

/// Returns a copy that lies as the tensor does, without a graph.
at::Tensor copy_with_layout(const at::Tensor& tensor);

}  // namespace reef
