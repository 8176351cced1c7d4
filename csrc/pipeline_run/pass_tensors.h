#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <iterator>
#include <map>
#include <vector>

namespace reef {

/// What goes into a pass of a chunk or comes out of it: inputs, outputs, or gradients of either. A tensor
/// that is received requires a gradient if the one that was sent did, and has no graph.
struct PassTensors {
  std::vector<at::Tensor> tensors = {};
  std::map<std::size_t, at::Tensor> skips = {};  ///< by the numbers of the skips that they are of
};

/// Takes the last tensors away, and returns them.
inline std::vector<at::Tensor> take_last(std::vector<at::Tensor>& tensors, std::size_t count) {
  const auto first = tensors.end() - static_cast<std::ptrdiff_t>(count);
  std::vector<at::Tensor> last(std::make_move_iterator(first), std::make_move_iterator(tensors.end()));
  tensors.erase(first, tensors.end());
  return last;
}

}  // namespace reef
