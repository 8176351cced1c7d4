#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "observer/observer.h"

namespace reef {

/// While one lives, the operator that takes the norms of a list of gradients (clip_grad_norm_ of torch in
/// Python) is refused those of these parts, and so is one that puts the norms of several of them into one
/// tensor (clip_grad_norm_ of torch in C++): each rank would get another norm and clip by it. It gets a
/// c10::Error that says what to call. The norm of one gradient by itself is the program's own business.
class NormsOfParts {
 public:
  explicit NormsOfParts(std::vector<at::Tensor> parts);
  ~NormsOfParts();
  NormsOfParts(const NormsOfParts&) = delete;
  NormsOfParts& operator=(const NormsOfParts&) = delete;

 private:
  class Listener;
  static Listener& listener();

  std::vector<at::Tensor> parts_;
  OperatorObservation observation_;
};

}  // namespace reef
