#include "tensor_layout.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <cstdint>

namespace reef {
namespace {

using at::Tensor;

/// Narrows each dimension along which elements share memory to one element.
Tensor without_repetition(Tensor tensor, const std::vector<std::int64_t>& strides) {
  for (std::size_t dim = 0; dim < strides.size(); ++dim) {
    const auto at = static_cast<std::int64_t>(dim);
    if (strides[dim] == 0 && tensor.size(at) > 1) tensor = tensor.narrow(at, 0, 1);
  }
  return tensor;
}

Tensor copy(const Tensor& tensor, const TensorLayout& layout) {
  const at::NoGradGuard no_grad;
  const std::size_t extent = at::detail::computeStorageNbytes(tensor.sizes(), layout.strides, 1);
  const auto options = tensor.options().requires_grad(false);
  const Tensor memory = at::empty({static_cast<std::int64_t>(extent) + layout.misaligned_elements}, options);
  Tensor made = at::empty({0}, options);
  made.set_(memory.storage(), layout.misaligned_elements, tensor.sizes(), layout.strides);
  without_repetition(made, layout.strides).copy_(without_repetition(tensor, layout.strides));
  return made;
}

}  // namespace

TensorLayout layout_of(const Tensor& tensor) {
  TensorLayout layout{tensor.strides().vec(), 0};
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  const auto bytes = static_cast<std::int64_t>(address % TensorLayout::kAlignment);
  const auto element = static_cast<std::int64_t>(tensor.element_size());
  if (bytes % element == 0) layout.misaligned_elements = bytes / element;
  return layout;
}

bool lies_in_order(const Tensor& tensor) {
  return tensor.numel() == 0 || (tensor.is_contiguous() && layout_of(tensor).misaligned_elements == 0);
}

Tensor with_layout(const Tensor& tensor, const TensorLayout& layout) {
  return tensor.numel() == 0 || layout_of(tensor) == layout ? tensor : copy(tensor, layout);
}

Tensor copy_with_layout(const Tensor& tensor) {
  const bool has_layout = tensor.layout() == at::kStrided && tensor.has_storage() && tensor.numel() > 0;
  return has_layout ? copy(tensor, layout_of(tensor)) : tensor.detach().clone();
}

}  // namespace reef
