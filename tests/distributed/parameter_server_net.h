// What tests of servers and workers share: a module, batches that every rank can make, and who serves.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "messages.h"

namespace reef::async_net {

using at::Tensor;
using messages::size;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(3);
    up = register_module("up", torch::nn::Linear(17, 33));
    down = register_module("down", torch::nn::Linear(33, 5));
    scale = register_parameter("scale", torch::ones({5}));
    frozen = register_parameter("frozen", torch::full({3}, 2.0), /*requires_grad=*/false);
  }
  Tensor loss(const Tensor& x) { return (down(torch::gelu(up(x))) * scale * frozen[0]).pow(2).mean(); }
  torch::nn::Linear up{nullptr}, down{nullptr};
  Tensor scale, frozen;
};
TORCH_MODULE(Net);

inline std::vector<Tensor> trained(const Net& net) {
  std::vector<Tensor> found;
  for (const Tensor& p : net->parameters()) {
    if (p.requires_grad()) found.push_back(p);
  }
  return found;
}

inline Tensor batch(int worker, std::int64_t clock) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(100 * worker + clock));
  return at::randn({4, 17}, generator);
}

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<Tensor>)>;
inline Make sgd() {
  return [](std::vector<Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                               torch::optim::SGDOptions(0.05).momentum(0.9));
  };
}
inline Make adam() {
  return [](std::vector<Tensor> parameters) {
    return std::make_unique<torch::optim::Adam>(std::move(parameters), torch::optim::AdamOptions(0.01));
  };
}

/// How many servers there can be beside one to three workers.
inline std::vector<int> server_counts() {
  std::vector<int> counts;
  for (const int servers : {1, 2}) {
    if (size() > servers && size() - servers <= 3) counts.push_back(servers);
  }
  return counts;
}

}  // namespace reef::async_net
