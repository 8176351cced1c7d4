#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "noted_parameters.h"

namespace reef {

/// A record that the exchange of one_bit_adam shares with the optimizer of its parameters, which must know
/// whether what it is given is a gradient or a momentum, and that nobody has changed it since.
class GivenMomentum {
 public:
  explicit GivenMomentum(double of_exchange) : beta1(of_exchange) {}
  const double beta1;
  std::atomic<bool> is_given{false};       ///< what the last pass gave as gradients is a momentum
  std::atomic<bool> has_optimizer{false};  ///< an optim::OneBitAdam has been made of the parameters

  /// Notes the gradient that a pass has just given to a parameter. While no optimizer steps.
  void note(const at::Tensor& parameter);
  /// Tells whether `gradient`, of the parameter's shape, has the bits that were noted last.
  bool has_noted(const at::Tensor& parameter, const at::Tensor& gradient) const;
  /// Takes over what `before` says of these parameters, whose gradients and optimizers stay.
  void go_on_from(const GivenMomentum& before, const std::vector<at::Tensor>& parameters);

 private:
  std::unordered_map<const c10::TensorImpl*, std::uint64_t> noted_;  ///< hashes of gradients
};

/// Parameters whose gradients are exchanged by one_bit_adam.
using ParametersOfMomentum = NotedParameters<std::shared_ptr<GivenMomentum>>;

/// Gives the record of a parameter, or nothing if its gradients are gradients only.
std::shared_ptr<GivenMomentum> given_momentum_of(const at::Tensor& parameter);

/// Throws ConfigError, as `who`, for a parameter whose gradient must stay as it was exchanged: the momentum
/// that ranks remember would be another.
void refuse_momentum(const char* who, const at::Tensor& parameter);

}  // namespace reef
