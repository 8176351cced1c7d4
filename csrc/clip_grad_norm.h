#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "reef/collectives.h"

namespace reef {

/// A tensor whose gradient is scaled, and who counts it in the norm.
struct GradientInNorm {
  enum class Counts : std::uint8_t {
    kEverywhere,  ///< every rank, since all have it
    kHere,        ///< this rank, for all
    kElsewhere,   ///< another rank
  };
  at::Tensor parameter;
  Counts counts;
};

/// As clip_grad_norm_(TensorList), where it is known who counts what. Ranks tell each other by way of
/// `device`.
double clip_grad_norm_(const std::vector<GradientInNorm>& gradients, double max_norm,
                       const ProcessGroupPtr& group, c10::Device device);

}  // namespace reef
