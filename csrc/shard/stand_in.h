#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>

#include "page/storage_access.h"

namespace reef {

/// Makes a tensor like `like` that has no memory: whoever reads or writes it gets a c10::Error with
/// `message`.
inline at::Tensor stand_in(const at::Tensor& like, const std::string& message) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), like.nbytes(),
                                                       c10::DataPtr(nullptr, like.device()),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  refuse_access(*storage, message);
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), like.key_set(),
                                                             like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

}  // namespace reef
