#include "budget/architectures.h"

namespace reef::test {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using at::Tensor;

// A module of children and a function over them.
struct Net : nn::Module {
  std::function<Tensor(Tensor)> body;
  Tensor forward(Tensor x) { return body(std::move(x)); }
};

template <class Build>
std::shared_ptr<Net> net(const Build& build) {
  auto module = std::make_shared<Net>();
  module->body = build(*module);
  return module;
}

// From the CPU's generator wherever they go, so that every device gets the same.
Tensor labels(std::int64_t classes, at::IntArrayRef shape) {
  return torch::randint(classes, shape).to(device());
}
Tensor normal(at::IntArrayRef shape) { return torch::randn(shape).to(device()); }
Tensor uniform(at::IntArrayRef shape) { return torch::rand(shape).to(device()); }

nn::Conv2d conv(std::int64_t in, std::int64_t out) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1).bias(false));
}

Training conv_batch_norm() {
  nn::Sequential layers;
  for (int i = 0; i < 8; ++i) {
    layers->push_back(conv(i == 0 ? 3 : 16, 16));
    layers->push_back(nn::BatchNorm2d(16));
    layers->push_back(nn::Functional(torch::relu));
  }
  layers->push_back(nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions(1)));
  layers->push_back(nn::Flatten());
  layers->push_back(nn::Linear(16, 10));
  return {layers.ptr(), [=]() mutable {
            return F::cross_entropy(layers->forward(normal({8, 3, 24, 24})), labels(10, {8}));
          }};
}

Training residual() {
  const auto module = net([](Net& self) {
    const auto stem = self.register_module("stem", conv(3, 16));
    std::vector<std::pair<nn::Conv2d, nn::BatchNorm2d>> blocks;
    for (int i = 0; i < 8; ++i) {
      blocks.emplace_back(self.register_module("conv" + std::to_string(i), conv(16, 16)),
                          self.register_module("norm" + std::to_string(i), nn::BatchNorm2d(16)));
    }
    const auto head = self.register_module("head", nn::Linear(16, 10));
    return [=](Tensor x) mutable {
      x = stem->forward(x);
      for (auto& [convolution, norm] : blocks) x = x + torch::relu(norm->forward(convolution->forward(x)));
      return head->forward(x.mean({2, 3}));
    };
  });
  return {module, [=] { return F::cross_entropy(module->forward(normal({8, 3, 24, 24})), labels(10, {8})); }};
}

Training u_net() {
  const auto module = net([](Net& self) {
    std::vector<nn::Conv2d> down;
    std::vector<nn::Conv2d> up;
    const std::int64_t widths[] = {3, 8, 16, 32, 64};
    for (int i = 0; i < 4; ++i) {
      down.push_back(self.register_module("down" + std::to_string(i), conv(widths[i], widths[i + 1])));
      up.push_back(
          self.register_module("up" + std::to_string(i), conv(2 * widths[i + 1], i == 0 ? 8 : widths[i])));
    }
    const auto middle = self.register_module("middle", conv(64, 64));
    const auto head = self.register_module("head", conv(8, 1));
    return [=](Tensor x) mutable {
      std::vector<Tensor> skips;
      for (auto& layer : down) {
        skips.push_back(torch::relu(layer->forward(x)));
        x = torch::max_pool2d(skips.back(), 2);
      }
      x = torch::relu(middle->forward(x));
      for (std::size_t i = up.size(); i-- > 0;) {
        x = F::interpolate(x, F::InterpolateFuncOptions().scale_factor(std::vector<double>{2, 2}));
        x = torch::relu(up[i]->forward(torch::cat({x, skips[i]}, 1)));
      }
      return head->forward(x);
    };
  });
  return {module, [=] {
            return F::binary_cross_entropy_with_logits(module->forward(normal({4, 3, 32, 32})),
                                                       uniform({4, 1, 32, 32}));
          }};
}

template <class Recurrent, class Options>
Training recurrent() {
  const auto module = net([](Net& self) {
    const auto cells =
        self.register_module("cells", Recurrent(Options(48, 48).num_layers(2).batch_first(true)));
    const auto head = self.register_module("head", nn::Linear(48, 20));
    return [=](const Tensor& x) mutable { return head->forward(std::get<0>(cells->forward(x))); };
  });
  return {module, [=] {
            const Tensor out = module->forward(normal({8, 40, 48}));
            return F::cross_entropy(out.reshape({-1, 20}), labels(20, {8 * 40}));
          }};
}

Training attention() {
  const auto module = net([](Net& self) {
    std::vector<nn::MultiheadAttention> layers;
    for (int i = 0; i < 6; ++i) {
      layers.push_back(self.register_module("layer" + std::to_string(i), nn::MultiheadAttention(64, 4)));
    }
    return [=](Tensor x) mutable {
      for (auto& layer : layers) x = x + std::get<0>(layer->forward(x, x, x));
      return x;
    };
  });
  return {module, [=] { return module->forward(normal({32, 4, 64})).pow(2).mean(); }};
}

Training encoder() {
  nn::TransformerEncoder layers(nn::TransformerEncoderOptions(
      nn::TransformerEncoderLayerOptions(64, 4).dim_feedforward(128).dropout(0.1), 6));
  return {layers.ptr(), [=]() mutable { return layers->forward(normal({24, 4, 64})).pow(2).mean(); }};
}

Training encoder_decoder() {
  nn::Transformer layers(nn::TransformerOptions(48, 4, 3, 3).dim_feedforward(96).dropout(0.1));
  return {layers.ptr(), [=]() mutable {
            return layers->forward(normal({20, 4, 48}), normal({16, 4, 48})).pow(2).mean();
          }};
}

Training tied_embeddings() {
  const auto module = net([](Net& self) {
    const auto embedding = self.register_module("embedding", nn::Embedding(300, 48));
    std::vector<nn::Linear> layers;
    for (int i = 0; i < 8; ++i)
      layers.push_back(self.register_module("layer" + std::to_string(i), nn::Linear(48, 48)));
    return [=](const Tensor& ids) mutable {
      Tensor x = embedding->forward(ids);
      for (auto& layer : layers) x = x + torch::gelu(layer->forward(x));
      return torch::matmul(x.mean(1), embedding->weight.t());
    };
  });
  return {module, [=] {
            return F::cross_entropy(module->forward(labels(300, {16, 20})), labels(300, {16}));
          }};
}

Training embedding_bag() {
  const auto module = net([](Net& self) {
    const auto bag =
        self.register_module("bag", nn::EmbeddingBag(nn::EmbeddingBagOptions(400, 32).mode(torch::kMean)));
    std::vector<nn::Linear> layers;
    for (int i = 0; i < 8; ++i)
      layers.push_back(self.register_module("layer" + std::to_string(i), nn::Linear(32, 32)));
    return [=](const Tensor& ids) mutable {
      Tensor x = bag->forward(ids);
      for (auto& layer : layers) x = torch::tanh(layer->forward(x));
      return x;
    };
  });
  return {module, [=] { return F::cross_entropy(module->forward(labels(400, {64, 12})), labels(32, {64})); }};
}

// Which expert sees which row depends on the data, and so do the shapes of a step.
Training mixture_of_experts() {
  const auto module = net([](Net& self) {
    const auto router = self.register_module("router", nn::Linear(48, 4));
    std::vector<nn::Linear> experts;
    for (int i = 0; i < 8; ++i) {
      experts.push_back(self.register_module("expert" + std::to_string(i), nn::Linear(48, 48)));
    }
    return [=](Tensor x) mutable {
      for (std::size_t layer = 0; layer < 2; ++layer) {
        const Tensor gate = torch::softmax(router->forward(x), 1);
        const Tensor chosen = gate.argmax(1);
        Tensor out = torch::zeros_like(x);
        for (std::int64_t expert = 0; expert < 4; ++expert) {
          const Tensor rows = (chosen == expert).nonzero().squeeze(1);
          if (rows.numel() == 0) continue;
          const Tensor seen =
              experts[4 * layer + static_cast<std::size_t>(expert)]->forward(x.index_select(0, rows));
          out = out.index_add(0, rows, seen * gate.index_select(0, rows).select(1, expert).unsqueeze(1));
        }
        x = x + torch::relu(out);
      }
      return x;
    };
  });
  return {module, [=] { return module->forward(normal({96, 48})).pow(2).mean(); }};
}

Training in_place_activations() {
  nn::Sequential layers;
  for (int i = 0; i < 8; ++i) {
    layers->push_back(nn::Linear(64, 64));
    layers->push_back(nn::ReLU(nn::ReLUOptions(true)));
    layers->push_back(nn::Functional([](const Tensor& x) { return x.clone().mul_(1.1).sigmoid_(); }));
  }
  return {layers.ptr(), [=]() mutable { return layers->forward(normal({64, 64})).pow(2).mean(); }};
}

Training dropout() {
  nn::Sequential layers;
  for (int i = 0; i < 8; ++i) {
    layers->push_back(nn::Linear(64, 64));
    layers->push_back(nn::Dropout(0.3));
    layers->push_back(nn::GELU());
  }
  return {layers.ptr(), [=]() mutable { return layers->forward(normal({64, 64})).pow(2).mean(); }};
}

struct Swish : torch::autograd::Function<Swish> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    const Tensor gate = torch::sigmoid(x);
    context->save_for_backward({x, gate});
    return x * gate;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * (saved[1] + saved[0] * saved[1] * (1 - saved[1]))};
  }
};

Training custom_function() {
  nn::Sequential layers;
  for (int i = 0; i < 8; ++i) {
    layers->push_back(nn::Linear(64, 64));
    layers->push_back(nn::Functional([](const Tensor& x) { return Swish::apply(x); }));
  }
  return {layers.ptr(), [=]() mutable { return layers->forward(normal({64, 64})).pow(2).mean(); }};
}

// A gradient in the loss: backward of backward.
Training gradient_penalty() {
  nn::Sequential layers;
  for (int i = 0; i < 6; ++i) {
    layers->push_back(nn::Linear(48, 48));
    layers->push_back(nn::Tanh());
  }
  return {layers.ptr(), [=]() mutable {
            const Tensor x = normal({48, 48}).requires_grad_();
            const Tensor y = layers->forward(x).pow(2).mean();
            const Tensor slope = torch::autograd::grad({y}, {x}, {}, true, true)[0];
            return y + slope.norm();
          }};
}

Training accumulation() {
  Training training = encoder();
  training.micro_batches = 3;
  return training;
}

Training two_backwards() {
  Training training = dropout();
  const auto loss = training.loss;
  training.loss = [loss] {
    const Tensor first = loss();
    first.backward({}, /*retain_graph=*/true);
    return first * 0.5;  // and again, by the caller
  };
  return training;
}

}  // namespace

c10::Device& device() {
  static c10::Device where = c10::kCPU;
  return where;
}

const std::vector<Architecture>& architectures() {
  static const std::vector<Architecture> all = {
      {"conv_batch_norm", conv_batch_norm},
      {"residual", residual},
      {"u_net", u_net},
      {"lstm", recurrent<nn::LSTM, nn::LSTMOptions>},
      {"gru", recurrent<nn::GRU, nn::GRUOptions>},
      {"attention", attention},
      {"encoder", encoder},
      {"encoder_decoder", encoder_decoder},
      {"tied_embeddings", tied_embeddings},
      {"embedding_bag", embedding_bag},
      {"mixture_of_experts", mixture_of_experts},
      {"in_place_activations", in_place_activations},
      {"dropout", dropout},
      {"custom_function", custom_function},
      {"gradient_penalty", gradient_penalty},
      {"accumulation", accumulation},
      {"two_backwards", two_backwards},
  };
  return all;
}

}  // namespace reef::test
