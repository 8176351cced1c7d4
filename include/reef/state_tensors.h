#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "reef/export.h"

namespace reef {

/// What an optimizer keeps for one parameter. A state that derives from this, beside LibTorch's
/// OptimizerParamState, is known to Budget::whole() and to ledgers that watch the optimizer, as LibTorch's
/// own states and those of reef::optim are.
struct REEF_API StateTensors {
  virtual ~StateTensors() = default;
  /// Those that are defined.
  virtual std::vector<at::Tensor> state_tensors() const = 0;
};

}  // namespace reef
