#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "noted_parameters.h"
#include "reef/collectives.h"

namespace reef {

/// A parameter whose gradient is scaled, and which ranks add its squares to the norm.
struct GradientInNorm {
  enum class Counts : std::uint8_t {
    kEverywhere,  ///< every rank, since all have it
    kHere,        ///< this rank, for all
    kElsewhere,   ///< another rank
  };
  at::Tensor parameter;
  Counts counts;
};

/// Parameters of one rank of a pipeline, while other ranks have the rest of the model. Their norm is not the
/// model's, so clip_grad_norm_(TensorList) refuses them.
struct OfOneRank {};
using ParametersOfOneRank = NotedParameters<OfOneRank>;

/// As clip_grad_norm_(TensorList), for callers that know which rank counts which parameter. Sums travel by
/// way of `device`.
double clip_grad_norm_(const std::vector<GradientInNorm>& gradients, double max_norm,
                       const ProcessGroupPtr& group, c10::Device device);

}  // namespace reef
