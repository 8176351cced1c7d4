#pragma once

#include <ATen/core/Tensor.h>

#include "page/pager.h"

namespace reef {

/// Keeps a tensor's memory in place, whatever the budget, while it is used outside of operators.
class Pinned {
 public:
  explicit Pinned(at::Tensor tensor) : tensor_(std::move(tensor)) {
    Pager::of(tensor_.device()).pin(tensor_);
  }
  ~Pinned() { Pager::of(tensor_.device()).unpin(tensor_); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  const at::Tensor& tensor() const { return tensor_; }

 private:
  at::Tensor tensor_;
};

}  // namespace reef
