#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

/// Reef's operators for optimizers, called through the dispatcher, so that whoever watches operators (a
/// budget, a profiler) sees them. Their schemas are in operators.cpp and state_operators.cpp.
namespace reef::optim::ops {

/// Steps parameters by a rule; gives, for each, how many elements of its gradient are not finite. `begins`:
/// those whose momentum begins with this step's gradient, though they have been stepped before.
at::Tensor step(const std::string& rule, const std::string& state, const std::string& master,
                at::TensorList parameters, at::TensorList gradients, at::TensorList states,
                at::TensorList masters, at::TensorList steps, at::ArrayRef<double> numbers,
                const std::optional<at::Tensor>& lr, const std::optional<at::Tensor>& grad_scale,
                const std::optional<at::Tensor>& found_inf, at::IntArrayRef begins,
                const std::optional<at::Tensor>& squares);
/// Rules of norms: of each parameter, int64 [n, 2, digits], what a step that begins like this makes its trust
/// ratio of: those of the parts of a whole, added up, are the whole's, for step().
at::Tensor squares(const std::string& rule, const std::string& state, const std::string& master,
                   at::TensorList parameters, at::TensorList gradients, at::TensorList states,
                   at::TensorList masters, at::TensorList steps, at::ArrayRef<double> numbers);
/// Checks gradients of one_bit_adam: check_given() in one_bit_adam.h.
void check_given(bool has_states, at::TensorList parameters, at::TensorList gradients);
/// Codes and scales of a state that is zero.
std::tuple<at::Tensor, at::Tensor> state(const at::Tensor& parameter, const std::string& state,
                                         bool is_signed);
/// Of values (float32) for a state of `parameter`.
std::tuple<at::Tensor, at::Tensor> encode(const at::Tensor& parameter, const at::Tensor& values,
                                          const std::string& state, bool is_signed);
at::Tensor decode(const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& like,
                  const std::string& state, bool is_signed);
/// Bytes of parameters that one step had best work on.
std::int64_t slice_bytes(c10::Device device);

}  // namespace reef::optim::ops
