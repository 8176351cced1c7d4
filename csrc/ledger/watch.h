#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "reef/category.h"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace reef {

/// `tensor`'s block gets `category`; a block older than the counting allocator is adopted first.
void mark_tensor(const at::Tensor& tensor, Category category);

/// What an optimizer of LibTorch's or of Reef's keeps for its parameters.
std::vector<at::Tensor> state_tensors(torch::optim::Optimizer& optimizer);

/// The optimizers that ledgers watch, so that their state can be marked while they step.
void watch_optimizer(torch::optim::Optimizer* optimizer);
void forget_optimizer(torch::optim::Optimizer* optimizer);

/// Marks the state that watched optimizers hold for `parameter`, which may be the parameter or an alias of
/// it.
void parameter_written(const at::Tensor& parameter);

}  // namespace reef
