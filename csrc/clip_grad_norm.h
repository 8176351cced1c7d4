#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
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

/// Parameters of which other ranks have others, as those of a pipeline's ranks, as long as this lives. Their
/// norm is not that of the model, so clip_grad_norm_(TensorList) refuses them.
class ParametersApart {
 public:
  ParametersApart() = default;
  ~ParametersApart();
  ParametersApart(const ParametersApart&) = delete;
  ParametersApart& operator=(const ParametersApart&) = delete;

  /// `instead`: what is to be called in its place.
  void add(const at::Tensor& parameter, const std::string& instead);

 private:
  std::vector<const c10::TensorImpl*> parameters_;
};

/// As clip_grad_norm_(TensorList), where it is known who counts what. Ranks tell each other by way of
/// `device`.
double clip_grad_norm_(const std::vector<GradientInNorm>& gradients, double max_norm,
                       const ProcessGroupPtr& group, c10::Device device);

}  // namespace reef
