#pragma once

#include <ATen/core/Tensor.h>

namespace reef {

/// Elements of `flat` from `offset` on, in this shape. A tensor of its own, not a view: an optimizer may
/// clear or detach it, it has a version counter of its own, and costs a tenth of a view. The memory need not
/// be there.
inline at::Tensor alias(const at::Tensor& flat, std::int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  at::Tensor own =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(flat.storage()), flat.key_set(), flat.dtype());
  own.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, flat.storage_offset() + offset);
  return own;
}
inline at::Tensor alias(const at::Tensor& flat, std::int64_t offset, std::int64_t elements) {
  return alias(flat, offset, {elements}, {1});
}

}  // namespace reef
