#include "checkpoint/storage_copy.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

namespace reef {

StorageCopy::StorageCopy(const c10::Storage& storage) : storage_(storage) {
  const at::NoGradGuard no_grad;
  bytes_ = place().clone();
}

at::Tensor StorageCopy::place() const {
  const at::NoGradGuard no_grad;
  at::Tensor bytes = at::empty({0}, at::TensorOptions(at::kByte).device(storage_.device()));
  return bytes.set_(storage_, 0, {static_cast<std::int64_t>(storage_.nbytes())}, {1});
}

void StorageCopy::put_back() const {
  const at::NoGradGuard no_grad;
  place().copy_(bytes_);
}

}  // namespace reef
