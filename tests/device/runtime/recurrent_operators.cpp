// The fused cells of recurrent networks, which LibTorch implements for CUDA only. Here they are implemented
// for the CPU with other operators.
#include <ATen/Functions.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using Biased = std::optional<Tensor>;

Tensor with(const Tensor& gates, const Biased& bias) {
  return bias && bias->defined() ? at::add(gates, *bias) : gates;
}
Tensor or_zeros(const Biased& gradient, const Tensor& like) {
  return gradient && gradient->defined() ? *gradient : at::zeros_like(like);
}
// Return the derivative of sigmoid and of tanh, given the value of the function.
Tensor of_sigmoid(const Tensor& value) { return at::mul(value, at::rsub(value, 1)); }
Tensor of_tanh(const Tensor& value) { return at::rsub(at::mul(value, value), 1); }
Tensor product(const Tensor& a, const Tensor& b, const Tensor& c) { return at::mul(at::mul(a, b), c); }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cx,
                                             const Biased& input_bias, const Biased& hidden_bias) {
  const auto gates = at::chunk(at::add(with(input, input_bias), with(hidden, hidden_bias)), 4, 1);
  const Tensor in = at::sigmoid(gates[0]), forget = at::sigmoid(gates[1]);
  const Tensor cell = at::tanh(gates[2]), out = at::sigmoid(gates[3]);
  const Tensor cy = at::add(at::mul(forget, cx), at::mul(in, cell));
  return {at::mul(out, at::tanh(cy)), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Biased& grad_hy, const Biased& grad_cy,
                                                      const Tensor& cx, const Tensor& cy,
                                                      const Tensor& workspace, bool has_bias) {
  const auto gates = at::chunk(workspace, 4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const Tensor of_hy = or_zeros(grad_hy, cx), squashed = at::tanh(cy);
  const Tensor of_cy = at::add(product(of_hy, out, of_tanh(squashed)), or_zeros(grad_cy, cx));
  const Tensor grad = at::cat({product(of_cy, cell, of_sigmoid(in)), product(of_cy, cx, of_sigmoid(forget)),
                               product(of_cy, in, of_tanh(cell)), product(of_hy, squashed, of_sigmoid(out))},
                              1);
  return {grad, at::mul(of_cy, forget), has_bias ? at::sum(grad, 0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& hx,
                                    const Biased& input_bias, const Biased& hidden_bias) {
  const auto from_input = at::chunk(with(input, input_bias), 3, 1);
  const auto from_hidden = at::chunk(with(hidden, hidden_bias), 3, 1);
  const Tensor reset = at::sigmoid(at::add(from_input[0], from_hidden[0]));
  const Tensor update = at::sigmoid(at::add(from_input[1], from_hidden[1]));
  const Tensor next = at::tanh(at::add(from_input[2], at::mul(reset, from_hidden[2])));
  const Tensor hy = at::add(next, at::mul(update, at::sub(hx, next)));
  return {hy, at::cat({reset, update, next, hx, from_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                     const Tensor& workspace, bool has_bias) {
  const auto kept = at::chunk(workspace, 5, 1);
  const Tensor &reset = kept[0], &update = kept[1], &next = kept[2], &hx = kept[3], &hidden_next = kept[4];
  const Tensor of_update = product(grad_hy, at::sub(hx, next), of_sigmoid(update));
  const Tensor of_next = product(grad_hy, at::rsub(update, 1), of_tanh(next));
  const Tensor of_reset = product(of_next, hidden_next, of_sigmoid(reset));
  const Tensor of_input = at::cat({of_reset, of_update, of_next}, 1);
  const Tensor of_hidden = at::cat({of_reset, of_update, at::mul(of_next, reset)}, 1);
  return {of_input, of_hidden, at::mul(grad_hy, update), has_bias ? at::sum(of_input, 0) : Tensor(),
          has_bias ? at::sum(of_hidden, 0) : Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}
