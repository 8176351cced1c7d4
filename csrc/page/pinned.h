#pragma once

#include <ATen/core/Tensor.h>

#include "page/pager.h"

namespace reef {

/// While it lives, a tensor's memory stays where it is, whatever the budget: for those who use it outside of
/// operators.
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
