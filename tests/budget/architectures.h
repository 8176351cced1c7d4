#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <vector>

namespace reef::test {

/// A model with the loss of one step on data of its own; every random number comes from the default
/// generator.
struct Training {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor()> loss;
  int micro_batches = 1;  ///< losses accumulated before the optimizer steps
};

struct Architecture {
  const char* name;
  std::function<Training()> make;
};

/// Where losses make their data; the CPU unless set.
c10::Device& device();

/// Each an ordinary LibTorch model whose largest operator is small beside the whole.
const std::vector<Architecture>& architectures();

}  // namespace reef::test
