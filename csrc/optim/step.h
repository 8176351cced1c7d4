#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/optim_step.h"
#include "optim/hyper.h"

namespace reef::optim {

/// The formats and masters by the names that Python and archives give them. Throw ConfigError.
kernels::OptimFormat optim_format(std::string_view name);
kernels::OptimMaster optim_master(std::string_view name);
std::string_view name(kernels::OptimFormat format);
std::string_view name(kernels::OptimMaster master);

/// One parameter, checked: what the kernel takes, and for which step.
struct OptimWork {
  kernels::OptimTensor tensor;
  kernels::OptimFormat format = kernels::OptimFormat::kFloat32;
  double step = 1;
  std::int64_t nonfinite = 0;  ///< elements of the gradient
};

/// Steps them all on the CPU, over LibTorch's threads. Tiles whose gradient is not finite stay as they are.
void step_on_cpu(kernels::OptimRule rule, const OptimHyper& hyper, std::vector<OptimWork>& works);

/// `values` (float32, contiguous, `elements` of them) to a state, and back.
void encode_on_cpu(kernels::OptimFormat format, bool is_signed, const float* values,
                   const kernels::OptimState& state, std::int64_t elements);
void decode_on_cpu(kernels::OptimFormat format, bool is_signed, const kernels::OptimState& state,
                   float* values, std::int64_t elements);

}  // namespace reef::optim
