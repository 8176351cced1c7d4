#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "reef/ledger.h"

namespace reef::chain_tests {

namespace nn = torch::nn;
using at::Tensor;
using Tensors = std::vector<Tensor>;

struct BlockImpl : nn::Module {
  BlockImpl(std::int64_t width, double dropout)
      : norm(nn::LayerNormOptions({width})), up(width, 4 * width), down(4 * width, width), drop(dropout) {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
    register_module("drop", drop);
  }
  Tensor forward(const Tensor& x) { return x + drop(down(torch::gelu(up(norm(x))))); }
  nn::LayerNorm norm;
  nn::Linear up, down;
  nn::Dropout drop;
};
TORCH_MODULE(Block);

struct Net {
  const char* name;
  nn::Sequential layers;
  Tensor input;
};

/// Of three kinds, with few stages.
inline std::vector<Net> nets() {
  torch::manual_seed(0);
  std::vector<Net> all;
  nn::Sequential blocks;
  for (int i = 0; i < 7; ++i) blocks->push_back(Block(32, i % 2 == 0 ? 0.2 : 0.0));
  all.push_back({"blocks", blocks, torch::randn({64, 32}, torch::requires_grad())});
  nn::Sequential convolutions;
  for (int i = 0; i < 4; ++i) {
    convolutions->push_back(nn::Conv2d(nn::Conv2dOptions(i == 0 ? 3 : 8, 8, 3).padding(1).bias(false)));
    convolutions->push_back(nn::BatchNorm2d(8));
    convolutions->push_back(nn::ReLU(nn::ReLUOptions(true)));  // in place: part of the stage before
  }
  convolutions->push_back(nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions(2)));
  convolutions->push_back(nn::Flatten());  // a view
  convolutions->push_back(nn::Linear(32, 5));
  all.push_back({"convolutions", convolutions, torch::randn({8, 3, 12, 12})});
  nn::Sequential uneven(nn::Linear(16, 256), nn::Tanh(), nn::Linear(256, 64), nn::Tanh(), nn::Linear(64, 200),
                        nn::Sigmoid(), nn::Linear(200, 128), nn::Tanh(), nn::Linear(128, 4));
  all.push_back({"uneven", uneven, torch::randn({512, 16})});
  return all;
}

struct Left {
  Tensors tensors;  ///< gradients, buffers, and where the generator is
  std::int64_t peak_bytes = 0;
};

/// A training step; buffers are put back.
template <class Forward>
Left step(const Net& net, const Forward& forward) {
  Tensors buffers;
  for (const Tensor& buffer : net.layers->buffers()) buffers.push_back(buffer.clone());
  net.layers.ptr()->zero_grad();
  net.input.mutable_grad() = Tensor();
  torch::manual_seed(7);
  Left left;
  {
    Ledger ledger;
    const std::int64_t before = ledger.live().total();
    ledger.reset_peak();
    const Tensor loss = forward(net.input).pow(2).mean();
    loss.backward();
    left.peak_bytes = ledger.peak().bytes.total() - before;
    left.tensors = {loss.detach(), torch::rand({4})};
  }
  for (const Tensor& parameter : net.layers->parameters()) left.tensors.push_back(parameter.grad().clone());
  if (net.input.requires_grad()) left.tensors.push_back(net.input.grad().clone());
  const torch::NoGradGuard no_grad;
  std::size_t index = 0;
  for (Tensor buffer : net.layers->buffers()) {
    left.tensors.push_back(buffer.clone());
    buffer.copy_(buffers[index++]);
  }
  return left;
}

inline void expect_equal(const Left& found, const Left& wanted, const std::string& of) {
  ASSERT_EQ(found.tensors.size(), wanted.tensors.size()) << of;
  for (std::size_t i = 0; i < found.tensors.size(); ++i) {
    EXPECT_TRUE(found.tensors[i].equal(wanted.tensors[i])) << of << ", tensor " << i;
  }
}

inline Left plain_step(Net& net) {
  Left left = step(net, [&](const Tensor& x) { return net.layers->forward(x); });
  net.layers->zero_grad();  // those that a profile finds are not made anew
  net.input.mutable_grad() = Tensor();
  return left;
}

}  // namespace reef::chain_tests
