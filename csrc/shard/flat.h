#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <functional>
#include <utility>

#include "alias.h"
#include "reef/shard_layout.h"

namespace reef {

/// Where these are: the first of them, whose tensor `tensor_of` gives. The CPU, if there are none.
template <class Items, class TensorOf = std::identity>
c10::Device device_of(const Items& items, const TensorOf& tensor_of = {}) {
  return items.empty() ? c10::Device(c10::kCPU) : std::invoke(tensor_of, items.front()).device();
}

/// A part of a parameter that this rank keeps.
struct KeptPart {
  ShardPiece piece;
  at::Tensor tensor;  ///< a leaf, one-dimensional
};

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
