#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/exact_sum.h"
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
  bool begins = false;                           ///< its momentum
  bool gets_momentum = false;                    ///< one_bit_adam: its gradient is one
  bool adapts = true;                            ///< to the ratio of norms: it has two dimensions or more
  std::optional<kernels::OptimSquares> squares;  ///< of the whole, if this is a part of it
};

/// Steps them all on the CPU, over LibTorch's threads. Tiles whose gradient is not finite stay as they are,
/// and so does all of a tensor in kInt4Rank1 that has one; `nonfinite`, of as many as there are works and
/// zero, takes the numbers of such elements.
void step_on_cpu(kernels::OptimRule rule, const OptimHyper& hyper, std::vector<OptimWork>& works,
                 std::int64_t* nonfinite);

/// Of which the trust ratios of these works, whose constants are set, are made, for rules that have them. A
/// tile's is added up in double, tiles without rounding: a whole is what its parts are together, if they
/// begin with a tile.
struct ExactSquares {
  kernels::ExactSum parameter, measured;
};
std::vector<ExactSquares> squares_on_cpu(kernels::OptimRule rule, const std::vector<OptimWork>& works);

/// `values` (float32, contiguous, `elements` of them) to a state, and back.
void encode_on_cpu(kernels::OptimFormat format, bool is_signed, const float* values,
                   const kernels::OptimState& state, std::int64_t elements);
void decode_on_cpu(kernels::OptimFormat format, bool is_signed, const kernels::OptimState& state,
                   float* values, std::int64_t elements);

/// The same for memory of a CUDA device, `nonfinite` too, on its current stream; nobody waits, but for the
/// norms of LAMB and LARS, which are added up in another order than on the CPU. A build without CUDA throws
/// ConfigError.
void step_on_cuda(c10::Device device, kernels::OptimRule rule, const OptimHyper& hyper,
                  std::vector<OptimWork>& works, std::int64_t* nonfinite);
void encode_on_cuda(c10::Device device, kernels::OptimFormat format, bool is_signed, const float* values,
                    const kernels::OptimState& state, std::int64_t elements);
void decode_on_cuda(c10::Device device, kernels::OptimFormat format, bool is_signed,
                    const kernels::OptimState& state, float* values, std::int64_t elements);

/// For works in kInt4Rank1: how many new scales they need, and memory for them.
std::int64_t new_scales_of(const std::vector<OptimWork>& works);
void set_new_scales(std::vector<OptimWork>& works, float* memory);

/// What a step computes with, but for the trust ratio, which is made of sums of squares. Once for a work.
void set_constants(kernels::OptimRule rule, const OptimHyper& hyper, OptimWork& work);
void set_trust(kernels::OptimRule rule, const OptimHyper& hyper, const kernels::OptimSquares& sum,
               OptimWork& work);

}  // namespace reef::optim
