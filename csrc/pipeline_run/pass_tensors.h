#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <vector>

namespace reef {

/// What goes into a pass of a chunk or comes out of it: inputs, outputs, or gradients of either. A tensor
/// that is received requires a gradient if the one that was sent did, and has no graph.
struct PassTensors {
  std::vector<at::Tensor> tensors = {};
  std::map<std::size_t, at::Tensor> skips = {};  ///< by the numbers of the skips that they are of
};

}  // namespace reef
