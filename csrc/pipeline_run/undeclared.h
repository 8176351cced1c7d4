#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <unordered_set>

namespace reef {

/// Throws ConfigError if a backward pass that begins at `ends` would make a gradient of a leaf that is not
/// among the `declared` parameters, since that gradient would be neither divided nor added up over ranks.
/// Leaves that can also be reached from `inputs` are allowed: they are the program's own. Leaves that are
/// used inside a region of checkpoint() are not found.
void check_declared(const torch::autograd::edge_list& ends, const torch::autograd::edge_list& inputs,
                    const std::unordered_set<const c10::TensorImpl*>& declared);

}  // namespace reef
