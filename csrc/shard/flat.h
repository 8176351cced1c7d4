#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "alias.h"
#include "reef/shard_layout.h"

namespace reef {

/// Where these are: the first of them, whose tensor `tensor_of` gives. The CPU, if there are none.
template <class Items, class TensorOf = std::identity>
c10::Device device_of(const Items& items, const TensorOf& tensor_of = {}) {
  return items.empty() ? c10::Device(c10::kCPU) : std::invoke(tensor_of, items.front()).device();
}

/// Where a parameter, or its gradient, lies in flat memory.
struct FlatPlace {
  std::int64_t offset = 0;
  std::vector<std::int64_t> shape, strides;
  std::size_t item = 0;  ///< of the layout
  at::Tensor of(const at::Tensor& flat) const { return alias(flat, offset, shape, strides); }
};

/// A part of a parameter that this rank keeps; without elements, where others keep all of it.
struct KeptPart {
  ShardPiece piece;
  at::Tensor tensor;  ///< a leaf, of part_shape() or, not divided, as the parameter
};

/// So many elements in as many dimensions as the parameter has, of which only the last is not 1: who decides
/// by their number decides for a part as for the whole. A part of a parameter without dimensions that has no
/// elements has one.
inline std::vector<std::int64_t> part_shape(const at::Tensor& parameter, std::int64_t elements) {
  if (parameter.dim() == 0 && elements == 1) return {};
  std::vector<std::int64_t> shape(static_cast<std::size_t>(std::max<std::int64_t>(parameter.dim(), 1)), 1);
  shape.back() = elements;
  return shape;
}
/// Of this shape, in memory without gaps.
inline at::Tensor part_alias(const at::Tensor& flat, std::int64_t offset, at::IntArrayRef part_shape) {
  const std::int64_t elements = part_shape.empty() ? 1 : part_shape.back();
  std::vector<std::int64_t> strides(part_shape.size(), std::max<std::int64_t>(elements, 1));
  if (!strides.empty()) strides.back() = 1;
  return alias(flat, offset, part_shape, strides);
}

/// All of a storage, in one dimension: such a tensor as `like`, but for the dtype.
inline at::Tensor all_of(c10::Storage storage, const at::Tensor& like, at::ScalarType dtype) {
  const auto elements = static_cast<std::int64_t>(storage.nbytes() / c10::elementSize(dtype));
  at::Tensor whole = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), like.key_set(),
                                                              c10::scalarTypeToTypeMeta(dtype));
  whole.unsafeGetTensorImpl()->set_sizes_contiguous(elements);
  return whole;
}

/// The same memory by another storage, which nobody is refused; `tensor`, whose address must not change,
/// lives as long.
inline at::Tensor unchecked(const at::Tensor& tensor) {
  void* const data = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  return all_of(c10::Storage(c10::make_intrusive<c10::StorageImpl>(
                    c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(),
                    c10::DataPtr(
                        data, new at::Tensor(tensor),
                        [](void* held) { delete static_cast<at::Tensor*>(held); }, tensor.device()),
                    /*allocator=*/nullptr, /*resizable=*/false)),
                tensor, tensor.scalar_type());
}

/// As `like` has them, in host memory: page-locked, if `like` is on a CUDA device.
inline at::Tensor empty_on_host(const at::Tensor& like) {
  return at::empty(like.sizes(), like.options().device(at::kCPU).pinned_memory(like.is_cuda()));
}

/// Whether they share memory, which need not be there.
inline bool same_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.has_storage() && b.has_storage() &&
         a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}
inline bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return same_storage(a, b) && a.storage_offset() == b.storage_offset();
}

}  // namespace reef
