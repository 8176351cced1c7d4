#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "reef/chain.h"

namespace reef {

/// As run(); calls `needed` when the first pass of backward is through the chain, with the most bytes that
/// the run has needed at once, as far as can be told from what the program does between. Not inside a budget.
at::Tensor run_measured(const Chain& chain, const Schedule& schedule, const at::Tensor& input,
                        const CheckpointOptions& options, const std::shared_ptr<Tier>& tier,
                        std::function<void(std::uint64_t bytes)> needed);

}  // namespace reef
