#pragma once

// The chains that are measured, and a step of one.

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "reef/ledger.h"

namespace reef::bench {

namespace nn = torch::nn;
using at::Tensor;

struct BottleneckImpl : nn::Module {
  BottleneckImpl(std::int64_t in, std::int64_t width, std::int64_t stride)
      : a(conv(in, width, 1, 1)), b(conv(width, width, 3, stride)), c(conv(width, 4 * width, 1, 1)) {
    register_module("a", a);
    register_module("b", b);
    register_module("c", c);
    if (stride > 1 || in != 4 * width) down = register_module("down", conv(in, 4 * width, 1, stride));
  }
  static nn::Sequential conv(std::int64_t in, std::int64_t out, std::int64_t size, std::int64_t stride) {
    return nn::Sequential(
        nn::Conv2d(nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false)),
        nn::BatchNorm2d(out));
  }
  Tensor forward(const Tensor& x) {
    const Tensor y = c->forward(torch::relu(b->forward(torch::relu(a->forward(x)))));
    return torch::relu(y + (down.is_empty() ? x : down->forward(x)));
  }
  nn::Sequential a, b, c, down{nullptr};
};
TORCH_MODULE(Bottleneck);

/// A Sequential in a Sequential: its own forward is a template.
struct PartImpl : nn::Module {
  explicit PartImpl(nn::Sequential all) : layers(register_module("layers", std::move(all))) {}
  Tensor forward(const Tensor& x) { return layers->forward(x); }
  nn::Sequential layers;
};
TORCH_MODULE(Part);

struct BlockImpl : nn::Module {
  explicit BlockImpl(std::int64_t width)
      : before(nn::LayerNormOptions({width})),
        between(nn::LayerNormOptions({width})),
        qkv(width, 3 * width),
        out(width, width),
        up(width, 4 * width),
        down(4 * width, width) {
    register_module("before", before);
    register_module("between", between);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("up", up);
    register_module("down", down);
  }
  Tensor forward(const Tensor& x) {
    const std::int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
    const Tensor all = qkv(before(x)).view({batch, length, 3, width / 64, 64}).permute({2, 0, 3, 1, 4});
    const Tensor mixed =
        at::scaled_dot_product_attention(all[0], all[1], all[2], {}, 0.0, /*is_causal=*/true);
    const Tensor y = x + out(mixed.transpose(1, 2).reshape({batch, length, width}));
    return y + down(torch::gelu(up(between(y))));
  }
  nn::LayerNorm before, between;
  nn::Linear qkv, out, up, down;
};
TORCH_MODULE(Block);

struct Net {
  std::string name;
  nn::Sequential layers;
  Tensor input;
  int rounds;
};

inline std::vector<Net> nets() {
  torch::manual_seed(0);
  nn::Sequential resnet(Part(nn::Sequential(
      nn::Conv2d(nn::Conv2dOptions(3, 64, 7).stride(2).padding(3).bias(false)), nn::BatchNorm2d(64),
      nn::ReLU(nn::ReLUOptions(true)), nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1)))));
  std::int64_t in = 64;
  for (const auto& [width, count, stride] : {std::tuple{64, 3, 1}, {128, 4, 2}, {256, 6, 2}, {512, 3, 2}}) {
    for (int i = 0; i < count; ++i) {
      resnet->push_back(Bottleneck(in, width, i == 0 ? stride : 1));
      in = 4 * width;
    }
  }
  resnet->push_back(Part(nn::Sequential(nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions(1)), nn::Flatten(),
                                        nn::Linear(2048, 1000))));
  nn::Sequential gpt;
  for (int i = 0; i < 24; ++i) gpt->push_back(Block(512));
  return {{"ResNet-50", resnet, torch::randn({4, 3, 160, 160}, torch::requires_grad()), 7},
          {"GPT of 24 blocks", gpt, torch::randn({2, 512, 512}, torch::requires_grad()), 3}};
}

using Call = std::function<Tensor(const Tensor&)>;

struct Found {
  double seconds;
  std::int64_t peak_bytes;
};

inline Call plain_call(const Net& net) {
  return [layers = net.layers](const Tensor& x) { return layers.ptr()->forward(x); };
}

inline void clear_gradients(const Net& net) {
  net.layers.ptr()->zero_grad();
  net.input.mutable_grad() = Tensor();
}

inline Found step(const Net& net, Ledger& ledger, const Call& call) {
  clear_gradients(net);
  const std::int64_t before = ledger.live().total();
  ledger.reset_peak();
  const auto begin = std::chrono::steady_clock::now();
  const Tensor loss = call(net.input).square().mean();
  loss.backward();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return {seconds, ledger.peak().bytes.total() - before};
}

inline std::vector<Tensor> gradients(const Net& net, Ledger& ledger, const Call& call) {
  step(net, ledger, call);
  std::vector<Tensor> all{net.input.grad().clone()};
  for (const Tensor& parameter : net.layers->parameters()) all.push_back(parameter.grad().clone());
  return all;
}

inline bool bit_equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Tensor& one, const Tensor& other) { return one.equal(other); });
}

double mebibytes(auto bytes) { return static_cast<double>(bytes) / 0x1p20; }

}  // namespace reef::bench
