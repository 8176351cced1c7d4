#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <memory>
#include <vector>

namespace reef {

/// A backward pass in two parts (2401.10241, section 2): the constructor makes the gradients of a graph's
/// inputs, for which another rank waits, and finish() the rest of the parameters' gradients.
///
/// Only nodes whose weight's gradient is a matrix product or a convolution wait for finish(). All others are
/// done at once, and what each has saved is let go when it has run. A node that waits keeps what it has
/// saved, and the gradient of its output. Each parameter's gradient is made by the same kernels from the same
/// operands as in a whole backward pass, and is added to what there is once, so both have the same bits.
/// Where that could not be so, a node does not wait: if another node of the graph uses its weight, too, or if
/// hooks are registered on it.
class SplitBackward {
 public:
  using NodePtr = decltype(torch::autograd::Edge::function);
  /// `gradients` are those of the `ends`. `inputs` are the nodes at which the graph begins; nullptr stands
  /// for one that wants no gradient. If none wants one, all of the pass is left to finish().
  SplitBackward(torch::autograd::edge_list ends, torch::autograd::variable_list gradients,
                const std::vector<NodePtr>& inputs);
  ~SplitBackward();
  SplitBackward(SplitBackward&&) noexcept;
  SplitBackward& operator=(SplitBackward&&) noexcept;
  SplitBackward(const SplitBackward&) = delete;
  SplitBackward& operator=(const SplitBackward&) = delete;

  void finish();

 private:
  /// A backward pass from some nodes towards some parameters, or towards all.
  struct Part {
    torch::autograd::edge_list from;
    torch::autograd::variable_list gradients;
    torch::autograd::edge_list parameters;
  };
  std::vector<Part> rest_;
};

}  // namespace reef
