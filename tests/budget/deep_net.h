#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace reef::test {

inline constexpr std::uint64_t kMany = std::uint64_t{1} << 40;

/// Sixteen small layers, none large beside the whole.
inline torch::nn::Sequential deep_net() {
  torch::nn::Sequential layers;
  for (int i = 0; i < 8; ++i) {
    layers->push_back(torch::nn::Linear(64, 64));
    layers->push_back(torch::nn::Tanh());
  }
  return layers;
}

inline std::vector<at::Tensor> copies(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& parameter : module.parameters()) tensors.push_back(parameter.detach().clone());
  return tensors;
}

inline void put(const std::vector<at::Tensor>& values, const torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  const auto parameters = module.parameters();
  for (std::size_t i = 0; i < values.size(); ++i) parameters[i].copy_(values[i]);
}

inline void sgd_step(torch::nn::Sequential& net) {
  net->zero_grad();
  net->forward(torch::ones({64, 64})).pow(2).mean().backward();
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : net->parameters()) parameter.sub_(parameter.grad(), 0.1);
}

}  // namespace reef::test
