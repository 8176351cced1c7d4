#pragma once

#include "reef/optimizer_state.h"

namespace torch::optim {
class OptimizerOptions;
}  // namespace torch::optim

namespace reef {

/// Options of a group, of any class, as its file has them.
OptimizerState::Values option_values(const torch::optim::OptimizerOptions& options);

}  // namespace reef
