#include "reef/checkpoint.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "reef/error.h"
#include "reef/ledger.h"

namespace reef {
namespace {

namespace nn = torch::nn;
using at::Tensor;
using Tensors = std::vector<Tensor>;

/// A module, a function of it, and inputs for that.
struct Row {
  const char* name;
  std::shared_ptr<nn::Module> module;
  std::function<Tensors(const Tensors&)> function;
  Tensors inputs;
};

Tensor leaf(at::IntArrayRef sizes) { return torch::randn(sizes, torch::requires_grad()); }

std::vector<Row> rows() {
  torch::manual_seed(0);
  std::vector<Row> all;
  {
    nn::Sequential net(nn::Linear(16, 64), nn::GELU(), nn::Dropout(0.3), nn::Linear(64, 16), nn::Tanh());
    all.push_back({"dropout",
                   net.ptr(),
                   [net](const Tensors& in) mutable { return Tensors{net->forward(in[0])}; },
                   {leaf({8, 16})}});
    all.push_back({"input without a gradient",
                   net.ptr(),
                   [net](const Tensors& in) mutable { return Tensors{net->forward(in[0])}; },
                   {torch::randn({8, 16})}});
    all.push_back({"two inputs, two outputs",
                   net.ptr(),
                   [net](const Tensors& in) mutable {
                     const Tensor middle = net->forward(in[0] * in[1]);
                     return Tensors{middle + in[0], middle.exp().sum(0)};
                   },
                   {leaf({8, 16}), leaf({8, 16})}});
    all.push_back({"autocast",
                   net.ptr(),
                   [net](const Tensors& in) mutable {
                     at::autocast::set_autocast_enabled(at::kCPU, true);
                     const Tensor out = net->forward(in[0]).to(at::kFloat);
                     at::autocast::set_autocast_enabled(at::kCPU, false);
                     at::autocast::clear_cache();
                     return Tensors{out};
                   },
                   {leaf({8, 16})}});
    all.push_back({"used twice",
                   net.ptr(),
                   [net](const Tensors& in) mutable { return Tensors{net->forward(net->forward(in[0]))}; },
                   {leaf({8, 16})}});
    all.push_back({"noise that is saved before it is drawn",
                   net.ptr(),
                   [net](const Tensors& in) mutable {
                     return Tensors{torch::rrelu(net->forward(in[0]), 0.1, 0.4, /*training=*/true)};
                   },
                   {leaf({8, 16})}});
    all.push_back({"written in place",
                   net.ptr(),
                   [net](const Tensors& in) mutable {
                     Tensor middle = net->forward(in[0]) * 2;
                     middle.add_(1).relu_();
                     return Tensors{middle.exp()};
                   },
                   {leaf({8, 16})}});
  }
  {
    nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)), nn::BatchNorm2d(8),
                       nn::ReLU(nn::ReLUOptions(true)), nn::MaxPool2d(2), nn::Flatten(),
                       nn::Linear(8 * 16, 10));
    all.push_back({"batch norm",
                   net.ptr(),
                   [net](const Tensors& in) mutable { return Tensors{net->forward(in[0])}; },
                   {leaf({4, 3, 8, 8})}});
  }
  {
    nn::LSTM lstm(nn::LSTMOptions(8, 12).num_layers(2).dropout(0.2));
    all.push_back({"recurrent",
                   lstm.ptr(),
                   [lstm](const Tensors& in) mutable { return Tensors{std::get<0>(lstm->forward(in[0]))}; },
                   {leaf({5, 4, 8})}});
  }
  {
    nn::TransformerEncoderLayer layer(nn::TransformerEncoderLayerOptions(16, 4).dim_feedforward(32));
    all.push_back({"attention",
                   layer.ptr(),
                   [layer](const Tensors& in) mutable { return Tensors{layer->forward(in[0])}; },
                   {leaf({6, 2, 16})}});
  }
  return all;
}

/// All that a step leaves: gradients, buffers, and where the generator is.
Tensors step(const Row& row, const std::function<Tensors(const Tensors&)>& function) {
  const auto module = row.module->clone();  // buffers of its own: the function has the first one's
  Tensors buffers;
  for (const Tensor& buffer : row.module->buffers()) buffers.push_back(buffer.clone());
  row.module->zero_grad();
  for (Tensor input : row.inputs) input.mutable_grad() = Tensor();
  torch::manual_seed(7);
  Tensor loss = torch::zeros({});
  for (const Tensor& output : function(row.inputs)) loss = loss + output.to(at::kFloat).pow(2).mean();
  loss.backward();
  Tensors left{loss.detach(), torch::rand({4})};
  for (const Tensor& parameter : row.module->parameters()) left.push_back(parameter.grad().clone());
  for (const Tensor& input : row.inputs) {
    if (input.requires_grad()) left.push_back(input.grad().clone());
  }
  const torch::NoGradGuard no_grad;
  std::size_t index = 0;
  for (Tensor buffer : row.module->buffers()) {
    left.push_back(buffer.clone());
    buffer.copy_(buffers[index++]);
  }
  return left;
}

void expect_equal(const Tensors& found, const Tensors& wanted, const std::string& of) {
  ASSERT_EQ(found.size(), wanted.size()) << of;
  for (std::size_t i = 0; i < found.size(); ++i)
    EXPECT_TRUE(found[i].equal(wanted[i])) << of << ", tensor " << i;
}

TEST(Checkpoint, EveryFunctionLeavesWhatItLeavesPlainly) {
  for (const Row& row : rows()) {
    const Tensors plain = step(row, row.function);
    for (const bool checks : {false, true}) {
      expect_equal(
          step(row,
               [&](const Tensors& in) { return checkpoint(row.function, in, {.check_values = checks}); }),
          plain, row.name);
    }
    const auto inner = [&](const Tensors& in) { return checkpoint(row.function, in); };
    const auto middle = [&](const Tensors& in) { return checkpoint(inner, in); };
    expect_equal(step(row, [&](const Tensors& in) { return checkpoint(middle, in); }), plain,
                 std::string(row.name) + ", nested");
  }
}

TEST(Checkpoint, FunctionsOfAnySignatureAreTaken) {
  const Tensor x = leaf({4}), y = leaf({4});
  const auto two = [](const Tensor& a, const Tensor& b) { return std::make_tuple(a * b, (a + b).exp()); };
  const auto [product, power] = checkpoint(two, x, y);
  (product + power).sum().backward();
  EXPECT_TRUE(x.grad().equal(y.detach() + (x + y).exp().detach()));
  nn::Linear linear(4, 4);
  EXPECT_TRUE(checkpoint(linear, x).equal(linear(x)));
  EXPECT_TRUE(checkpoint(CheckpointOptions{.check_values = true}, linear, x).equal(linear(x)));
}

TEST(Checkpoint, OnlyInputsAreKept) {
  Ledger ledger;
  nn::Sequential net;
  for (int i = 0; i < 6; ++i) {
    net->push_back(nn::Linear(32, 32));
    net->push_back(nn::Tanh());
  }
  const Tensor x = leaf({64, 32});
  const auto kept = [&](bool checkpoints) {
    const std::int64_t before = ledger.live().total();
    const Tensor y =
        checkpoints ? checkpoint([&](const Tensor& in) { return net->forward(in); }, x) : net->forward(x);
    return ledger.live().total() - before - static_cast<std::int64_t>(y.nbytes());
  };
  EXPECT_EQ(kept(true), 0);
  EXPECT_GE(kept(false), 5 * 64 * 32 * 4);
}

TEST(Checkpoint, RunsTheFunctionOnceMoreAndNoFurtherThanNeeded) {
  int begun = 0, ended = 0;
  const Tensor x = leaf({8, 8}), weight = leaf({8, 8});
  const auto function = [&](const Tensor& in) {
    ++begun;
    const Tensor out = in.exp().mm(weight);
    const Tensor sum = out + 1;  // saves nothing
    ++ended;
    return sum;
  };
  const Tensor y = checkpoint(function, x);
  EXPECT_EQ(begun, 1);
  y.sum().backward();
  EXPECT_EQ(begun, 2);
  EXPECT_EQ(ended, 1);  // product and sum were not computed again
}

TEST(Checkpoint, OutsideOfGradModeItIsThePlainCall) {
  int calls = 0;
  const auto function = [&](const Tensor& in) {
    ++calls;
    return in.exp();
  };
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(checkpoint(function, leaf({3})).requires_grad());
  EXPECT_EQ(calls, 1);
}

TEST(Checkpoint, GradientsOfCapturedTensorsArrive) {
  const Tensor x = leaf({5}), outside = leaf({5});
  const Tensor middle = outside.exp();
  checkpoint([middle](const Tensor& in) { return in * middle; }, x).sum().backward();
  EXPECT_TRUE(outside.grad().equal((x * middle).detach()));
}

TEST(Checkpoint, GradRetainedGraphsAndDoubleBackward) {
  const Tensor x = leaf({6, 6});
  const auto function = [](const Tensor& in) { return in.mm(in).tanh().mm(in).sin(); };
  const Tensor plain = function(x).sum();
  const Tensor ours = checkpoint(function, x).sum();
  const auto gradient = [&](const Tensor& of, bool keep) {
    return torch::autograd::grad({of}, {x}, {}, keep)[0];
  };
  const Tensor wanted = gradient(plain, true);
  EXPECT_TRUE(gradient(ours, true).equal(wanted));
  EXPECT_TRUE(gradient(ours, true).equal(wanted));
  EXPECT_TRUE(gradient(ours, false).equal(wanted));
  EXPECT_ANY_THROW(gradient(ours, false));

  const auto twice = [&](const Tensor& of) {
    const Tensor first = torch::autograd::grad({of}, {x}, {}, true, true)[0];
    return torch::autograd::grad({first.pow(2).sum()}, {x})[0];
  };
  EXPECT_TRUE(twice(checkpoint(function, x).sum()).equal(twice(function(x).sum())));
}

TEST(Checkpoint, BackwardOnAnotherThread) {
  nn::Sequential net(nn::Linear(8, 8), nn::Dropout(0.5), nn::Tanh());
  const Tensor x = leaf({4, 8});
  const auto gradient = [&](bool other) {
    x.mutable_grad() = Tensor();
    torch::manual_seed(3);
    const Tensor y = checkpoint([&](const Tensor& in) { return net->forward(in); }, x).sum();
    if (other) {
      std::thread([&] { y.backward(); }).join();
    } else {
      y.backward();
    }
    return x.grad().clone();
  };
  EXPECT_TRUE(gradient(true).equal(gradient(false)));
}

TEST(Checkpoint, WhatAFunctionThrowsArrivesAndNothingIsLeftBehind) {
  const Tensor x = leaf({4});
  int calls = 0;
  int fails_at = 1;
  const auto function = [&](const Tensor& in) {
    const Tensor out = torch::dropout(in.exp(), 0.5, true);
    if (++calls == fails_at) throw std::runtime_error("no");
    return out.sin();
  };
  EXPECT_THROW(checkpoint(function, x), std::runtime_error);
  fails_at = 3;
  torch::manual_seed(1);
  const Tensor y = checkpoint(function, x).sum();
  const Tensor state = at::globalContext().defaultGenerator(at::kCPU).get_state();
  EXPECT_THROW(y.backward({}, /*retain_graph=*/true), std::runtime_error);
  EXPECT_TRUE(at::globalContext().defaultGenerator(at::kCPU).get_state().equal(state));
  y.backward();  // and now it does not
  EXPECT_TRUE(x.grad().defined());
  const Tensor plain = x.detach().clone().requires_grad_();
  (plain * 2).sum().backward();  // nothing saved here goes anywhere
}

TEST(Checkpoint, AFunctionThatComputesSomethingElseIsRefused) {
  const auto refused = [](const auto& function, bool checks, const char* words) {
    const Tensor x = leaf({4});
    const Tensor y = checkpoint(CheckpointOptions{.check_values = checks}, function, x).sum();
    try {
      y.backward();
      ADD_FAILURE() << words;
    } catch (const RecomputeError& error) {
      EXPECT_NE(message_of(error).find(words), std::string::npos) << message_of(error);
    }
  };
  int calls = 0;
  refused([&](const Tensor& in) { return ++calls == 1 ? in.exp() : in.repeat({2}).exp(); }, false,
          "was Float [4]");
  calls = 0;
  refused([&](const Tensor& in) { return ++calls == 1 ? in.exp().sin() : in + 1; }, false,
          "has saved 0 tensors");
  calls = 0;
  refused([&](const Tensor& in) { return ++calls == 1 ? in.exp() : (in + 1).exp(); }, true,
          "has other values");
  Tensor captured = torch::ones({4});
  const Tensor x = leaf({4});
  const Tensor y = checkpoint([captured](const Tensor& in) { return in * captured; }, x).sum();
  captured.add_(1);
  EXPECT_THROW(y.backward(), RecomputeError);
}

}  // namespace
}  // namespace reef
