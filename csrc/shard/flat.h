#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace reef {

/// Elements of `flat` from `offset` on, in this shape. A tensor of its own, not a view: an optimizer may
/// clear or detach it, and it has a version counter of its own.
inline at::Tensor alias(const at::Tensor& flat, std::int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  at::Tensor own = at::empty({0}, flat.options());
  own.set_(flat.storage(), flat.storage_offset() + offset, sizes, strides);
  return own;
}
inline at::Tensor alias(const at::Tensor& flat, std::int64_t offset, std::int64_t elements) {
  return alias(flat, offset, {elements}, {1});
}

/// Whether they begin at the same byte of memory.
inline bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.storage_offset() == b.storage_offset();
}

}  // namespace reef
