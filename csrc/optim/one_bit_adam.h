#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/TensorBody.h>

#include <string_view>
#include <vector>

#include "optim/hyper.h"
#include "optim/step.h"

/// 1-bit Adam (Tang et al., 2102.02888): Adam in the warm-up of its exchange; from then on the gradient is
/// the momentum, and the second moment stays as it is. The exchange records which of the two a gradient is.
namespace reef::optim {

constexpr bool is_one_bit_adam(std::string_view rule) { return rule == "one_bit_adam"; }

/// Checks a parameter group when it is made and before each step. Throws ConfigError for parameters of the
/// exchange and another rule, for this rule and other parameters, another beta1 than the exchange's, states
/// that are not float32, and amsgrad.
void check_exchange(std::string_view rule, std::string_view state, const OptimHyper& hyper,
                    at::TensorList parameters);

/// Checks the gradients that a step of this rule is about to use. Throws ConfigError for one that is not, bit
/// for bit, what the last pass has given; and for a momentum where the optimizer has no states of any
/// parameter (not `has_states`), so that no momentum would step one.
void check_given(bool has_states, at::TensorList parameters, at::TensorList gradients);

/// Tells whether the parameter's gradient is a momentum. Throws ConfigError if no exchange has recorded it.
bool gets_momentum(const at::Tensor& parameter);

/// Gives the constants of a step by the momentum, in place of Adam's: w = kept w - lr m / (sqrt(v) + eps),
/// and m is the first state.
void step_by_momentum(const OptimHyper& hyper, kernels::OptimConstants& constants);

/// Second moments that are 0 become infinite, so that what had no gradient in the warm-up stays as it is.
void hold_without_moment(const at::Tensor& second);

}  // namespace reef::optim
