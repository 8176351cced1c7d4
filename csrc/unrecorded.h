#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>

namespace reef {

/// While it lives, this thread's operators are recorded neither by autograd nor by observers, and make
/// ordinary tensors: for what is done within an operator of the program, whatever mode that runs in.
class Unrecorded {
  c10::InferenceMode ordinary_{false};  // it enables gradients, too
  at::NoGradGuard no_grad_;
  at::DisableRecordFunctionGuard unobserved_;
};

}  // namespace reef
