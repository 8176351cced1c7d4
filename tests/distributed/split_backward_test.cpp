// Run as several ranks by tests/support/ranks.py.
#include "pipeline_run/split_backward.h"

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "pipelines.h"
#include "reef/checkpoint.h"

namespace reef {
namespace {

using namespace pipeline_tests;

/// Ways to use weights, each as a stage of tensors of [rows, 4, 6].
struct Use {
  std::string name;
  std::vector<std::vector<std::int64_t>> weights;
  std::function<Tensor(const Tensor& x, const Tensors& w)> run;
};
struct Doubles : torch::autograd::Function<Doubles> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return 2 * x; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {2 * gradients[0]};
  }
};
std::vector<Use> uses() {
  const auto hooked = [](Tensor tensor) {
    tensor.register_hook([](const Tensor& gradient) { return 3 * gradient; });
    return tensor;
  };
  return {
      {"linear", {{6, 6}, {6}}, [](auto& x, auto& w) { return torch::linear(x, w[0], w[1]).tanh(); }},
      {"linear without bias", {{6, 6}}, [](auto& x, auto& w) { return torch::linear(x, w[0]); }},
      {"matmul", {{6, 6}}, [](auto& x, auto& w) { return x.matmul(w[0]); }},
      {"a weight on the left", {{4, 4}}, [](auto& x, auto& w) { return w[0].matmul(x); }},
      {"two dimensions",
       {{6, 6}, {6}},
       [](auto& x, auto& w) {
         return torch::addmm(w[1], x.reshape({-1, 6}), w[0], 0.5, 2).view_as(x);
       }},
      {"batched", {{4, 6, 6}}, [](auto& x, auto& w) { return x.transpose(0, 1).bmm(w[0]).transpose(0, 1); }},
      {"used twice", {{6, 6}}, [](auto& x, auto& w) { return x.matmul(w[0]).tanh().matmul(w[0]); }},
      {"used twice, transposed", {{6, 6}}, [](auto& x, auto& w) { return x.matmul(w[0]).matmul(w[0].t()); }},
      {"used twice by one view",
       {{6, 6}},
       [](auto& x, auto& w) {
         const Tensor view = w[0].t();
         return x.matmul(view) + x.tanh().matmul(view);
       }},
      {"product of weights", {{6, 6}, {6, 6}}, [](auto& x, auto& w) { return x.matmul(w[0].matmul(w[1])); }},
      {"cast",
       {{6, 6}},
       [](auto& x, auto& w) {
         return x.to(torch::kDouble).matmul(w[0].to(torch::kDouble)).to(torch::kFloat);
       }},
      {"scaled weight", {{6, 6}, {1}}, [](auto& x, auto& w) { return x.matmul(w[0] * w[1]); }},
      {"convolution", {{4, 4, 3}, {4}}, [](auto& x, auto& w) { return torch::conv1d(x, w[0], w[1], 1, 1); }},
      {"elementwise", {{6}, {4, 1}}, [](auto& x, auto& w) { return x * w[0] + w[1]; }},
      {"layer norm",
       {{6}, {6}, {6, 6}},
       [](auto& x, auto& w) { return torch::layer_norm(x.matmul(w[2]), {6}, w[0], w[1]); }},
      {"embedding", {{9, 6}}, [](auto& x, auto& w) { return x + torch::embedding(w[0], torch::arange(4)); }},
      {"gru",
       {{18, 6}, {18, 6}, {18}, {18}},
       [](auto& x, auto& w) {
         return std::get<0>(torch::gru(x, torch::zeros({1, 4, 6}), w, true, 1, 0.0, true, false, false));
       }},
      {"attention",
       {{18, 6}},
       [](auto& x, auto& w) {
         const auto qkv = torch::linear(x, w[0]).chunk(3, -1);
         return torch::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2]);
       }},
      {"einsum",
       {{6, 2, 3}},
       [](auto& x, auto& w) {
         return torch::einsum("rij,jkl->rikl", {x, w[0]}).flatten(2);
       }},
      {"custom function", {{6, 6}}, [](auto& x, auto& w) { return Doubles::apply(x.matmul(w[0])); }},
      {"custom function of a weight",
       {{6, 6}},
       [](auto& x, auto& w) { return x.matmul(Doubles::apply(w[0])); }},
      {"hook on an output", {{6, 6}}, [hooked](auto& x, auto& w) { return hooked(x.matmul(w[0])).tanh(); }},
      {"hook on a view of a weight",
       {{6, 6}},
       [hooked](auto& x, auto& w) { return x.matmul(hooked(w[0].t())); }},
      {"hook on a product",
       {{6, 6}},
       [hooked](auto& x, auto& w) {
         return hooked(x.reshape({-1, 6}).mm(w[0])).view_as(x);
       }},
      {"retained gradient of a product",
       {{6, 6}},
       [](auto& x, auto& w) {
         Tensor y = x.reshape({-1, 6}).mm(w[0]);
         y.retain_grad();
         return y.view_as(x);
       }},
      {"retained gradient",
       {{6, 6}},
       [](auto& x, auto& w) {
         Tensor y = x.matmul(w[0]);
         y.retain_grad();
         return y.tanh();
       }},
      {"in place", {{6, 6}, {6}}, [](auto& x, auto& w) { return torch::linear(x, w[0]).add_(w[1]).relu_(); }},
      {"a part that nothing reaches",
       {{6, 6}, {6, 6}},
       [](auto& x, auto& w) { return x.matmul(w[0]) + x.matmul(w[1]).detach(); }},
      {"an input without a gradient",
       {{6, 6}, {6, 6}},
       [](auto& x, auto& w) { return x.matmul(w[0]) + x.detach().matmul(w[1]); }},
      {"no weight", {}, [](auto& x, auto&) { return x.sin(); }},
      {"checkpointed",
       {{6, 6}},
       [](auto& x, auto& w) { return checkpoint([w](const Tensor& y) { return y.matmul(w[0]).sin(); }, x); }},
  };
}

TEST(Pipeline, SplitBackwardPassesHaveTheBitsOfWholeOnes) {
  for (const Use& use : uses()) {
    std::map<std::string, Bits> of_schedule;
    for (const std::string schedule : {"1f1b", "zero_bubble"}) {
      std::vector<PipelineStage> stages(static_cast<std::size_t>(2 * size()));
      torch::manual_seed(11);
      for (std::size_t i = 0; i < stages.size(); ++i) {
        Tensors weights;
        for (const auto& sizes : use.weights) {
          weights.push_back(torch::randn(sizes).set_requires_grad(true));
          stages[i].parameters.emplace_back(std::to_string(i) + "." + std::to_string(weights.size()),
                                            weights.back());
        }
        stages[i].run = [&use, weights](const Tensors& given) -> Tensors {
          return {use.run(given[0], weights)};
        };
      }
      Pipeline pipeline(stages, world(), {.micro_batches = 4, .schedule = schedule});
      for (std::int64_t step = 0; step < 2; ++step) {
        torch::manual_seed(static_cast<std::uint64_t>(20 + step));
        const bool trains_batch = use.weights.empty();  // or the loss would depend on nothing that is trained
        pipeline.step(torch::randn({9, 4, 6}).set_requires_grad(trains_batch), loss_of);
      }
      of_schedule[schedule] = gradients_of(pipeline.named_parameters());
    }
    for (const auto& [name, expected] : of_schedule["1f1b"]) {
      const Tensor& gradient = of_schedule["zero_bubble"].at(name);
      ASSERT_EQ(gradient.defined(), expected.defined()) << use.name << name;
      EXPECT_TRUE(!expected.defined() || same(gradient, expected)) << use.name << name;
    }
  }
}

TEST(SplitBackward, OnlyProductsWait) {
  namespace ta = torch::autograd;
  torch::manual_seed(5);
  const auto parameter = [](at::IntArrayRef sizes) { return torch::randn(sizes).set_requires_grad(true); };
  const Tensor x = parameter({5, 6}), scale = parameter({6}), up = parameter({7, 6}),
               up_bias = parameter({7}), down = parameter({6, 7});
  const Tensors at_once = {x, scale}, later = {up, up_bias, down};
  const auto forward = [&](c10::Storage& only_for_sin) {
    const Tensor inner = torch::linear(x * scale, up, up_bias);
    only_for_sin = inner.storage();
    return torch::linear(inner.sin(), down);
  };
  c10::Storage saved;
  const Tensor gradient = torch::randn({5, 6});
  forward(saved).backward(gradient);
  Tensors expected;
  for (const Tensors& all : {at_once, later}) {
    for (const Tensor& each : all) {
      expected.push_back(each.grad().clone());
      each.mutable_grad().reset();
    }
  }

  Tensor output = forward(saved);
  const ta::Edge end = ta::impl::gradient_edge(output);
  output.reset();
  EXPECT_GT(saved.use_count(), 1);
  SplitBackward halves({end}, {gradient}, {ta::impl::grad_accumulator(x)});
  EXPECT_EQ(saved.use_count(), 1) << "what a sine has saved is let go at once";
  for (const Tensor& each : at_once) EXPECT_TRUE(each.grad().defined());
  for (const Tensor& each : later) EXPECT_FALSE(each.grad().defined());
  halves.finish();
  std::size_t i = 0;
  for (const Tensors& all : {at_once, later}) {
    for (const Tensor& each : all) EXPECT_TRUE(same(each.grad(), expected[i++]));
  }
}

TEST(SplitBackward, WithoutAnInputThatWantsAGradientAllOfItWaits) {
  const Tensor weight = torch::ones({3, 3}).set_requires_grad(true);
  const Tensor output = torch::ones({2, 3}).matmul(weight).sin();
  SplitBackward halves({torch::autograd::impl::gradient_edge(output)}, {torch::ones({2, 3})}, {nullptr});
  EXPECT_FALSE(weight.grad().defined());
  halves.finish();
  EXPECT_TRUE(weight.grad().defined());
}

TEST(SplitBackward, WhatIsNeverFinishedLeavesNothing) {
  const Tensor x = torch::ones({2, 3}).set_requires_grad(true),
               weight = torch::ones({3, 3}).set_requires_grad(true);
  const Tensor output = x.matmul(weight);
  {
    const SplitBackward halves({torch::autograd::impl::gradient_edge(output)}, {torch::ones({2, 3})},
                               {torch::autograd::impl::grad_accumulator(x)});
  }
  EXPECT_FALSE(weight.grad().defined());
  EXPECT_TRUE(output.grad_fn()->pre_hooks().empty());
}

}  // namespace
}  // namespace reef
